"""Measuring: workloads as data, peers, timing against the read floor, result files, tables and plots."""
