"""Files of data that are not on this machine: read with a limit of time, and copied to it once. URLs need fsspec:
pip install 'rankwise[remote]'."""

from rankwise.files.cache import FileCache

__all__ = ["FileCache"]
