"""Data files that are not on this machine: read with a time limit, and copied once to a local disk. URLs need fsspec:
pip install 'rankwise[remote]'."""

from rankwise.files.cache import FileCache

__all__ = ["FileCache"]
