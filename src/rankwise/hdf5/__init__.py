"""HDF5 files for training, read at the speed of memory, and written. Needs h5py: pip install 'rankwise[hdf5]'."""

from rankwise.hdf5.dataset import HDF5Dataset
from rankwise.hdf5.writer import HDF5Writer

__all__ = ["HDF5Dataset", "HDF5Writer"]
