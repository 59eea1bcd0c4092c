"""Adapters for other libraries, each imported by name: none is needed to use flash_decode()."""
