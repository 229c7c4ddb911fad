"""Benchmarks: `python -m benchmarks.NAME --help`. Each prints one line of JSON on stdout."""
