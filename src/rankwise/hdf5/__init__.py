"""HDF5 files for training: rankwise reads them at the speed of memory, and writes them. Needs h5py: pip install
'rankwise[hdf5]'."""

from rankwise.hdf5.dataset import HDF5Dataset
from rankwise.hdf5.writer import HDF5Writer

__all__ = ["HDF5Dataset", "HDF5Writer"]
