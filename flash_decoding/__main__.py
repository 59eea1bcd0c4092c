"""python -m flash_decoding: the command line."""

from flash_decoding.cli.main import app

app()
