"""The few calls of the CUDA driver that torch does not offer, through ctypes: virtual memory.

Everything here needs the device's context to be there already, which torch makes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_OUT_OF_MEMORY = 2
_READ_WRITE = 3
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PORTABLE = 1
_HAS_VIRTUAL_MEMORY = 102


class DriverError(RuntimeError):
    """The driver, or the device, refused a call."""


class Driver:
    """libcuda. Raises `DriverError` where there is none."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"the driver's library is not found: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        """One function. Raises `MemoryError` when memory is short, `DriverError` otherwise."""
        result = getattr(self._cuda, name)(*arguments)
        if not result:
            return
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(result, ctypes.byref(text))
        said = f"{name}: error {result}, {(text.value or b'unknown').decode()}"
        if result == _OUT_OF_MEMORY:
            raise MemoryError(said)
        raise DriverError(said)

    def pin(self, address: int, num_bytes: int) -> None:
        """Make host pages stay where they are, for all devices to read and write."""
        self.call(
            "cuMemHostRegister_v2", ctypes.c_void_p(address), _size(num_bytes),
            ctypes.c_uint(_PORTABLE),
        )  # fmt: skip

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_meta", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DriverMemory:
    """The CUDA driver's virtual memory on one device, whose context there must be already.

    Raises `DriverError` where the driver or the device has none.
    """

    def __init__(self, device: torch.device) -> None:
        torch.zeros(1, device=device)  # makes the context
        self._device = device
        number = torch.cuda.current_device() if device.index is None else device.index
        self._call = Driver().call
        has = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(has), _HAS_VIRTUAL_MEMORY, number)
        if not has.value:
            raise DriverError("the device has no virtual memory management")
        location = _Location(_ON_DEVICE, number)
        self._kind = _Allocation(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._kind), 0)
        self.granularity = size.value

    def reserve(self, num_bytes: int) -> int:
        """See `memory.VirtualMemory`."""
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), _size(num_bytes),
            _size(self.granularity), ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        return address.value

    def map(self, address: int, num_bytes: int) -> None:
        """See `memory.VirtualMemory`."""
        handle, size = ctypes.c_uint64(), _size(num_bytes)
        kind = ctypes.byref(self._kind)
        self._call("cuMemCreate", ctypes.byref(handle), size, kind, ctypes.c_uint64(0))
        place, start = ctypes.c_uint64(address), _size(0)
        try:
            self._call("cuMemMap", place, size, start, handle, ctypes.c_uint64(0))
        finally:
            # The memory lives on as long as it is mapped.
            self._call("cuMemRelease", handle)

    def allow_access(self, address: int, num_bytes: int) -> None:
        """See `memory.VirtualMemory`."""
        access = ctypes.byref(self._access)
        self._call("cuMemSetAccess", ctypes.c_uint64(address), _size(num_bytes), access, _size(1))

    def unmap(self, address: int, num_bytes: int) -> None:
        """See `memory.VirtualMemory`."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), _size(num_bytes))

    def free(self, address: int, num_bytes: int) -> None:
        """See `memory.VirtualMemory`."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), _size(num_bytes))

    def wait(self) -> None:
        """See `memory.VirtualMemory`."""
        torch.cuda.synchronize(self._device)


def _size(num_bytes: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(num_bytes)
