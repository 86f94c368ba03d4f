"""The structs of core/api.h, field by field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_char_p, c_uint16, c_uint32, c_uint64, c_void_p


class SassBank(Structure):
    _fields_ = (("index", c_uint32), ("bytes", c_uint32), ("data", c_void_p))


class SassAllocation(Structure):
    _fields_ = (
        ("address", c_uint64), ("bytes", c_uint64), ("data", c_void_p), ("period", c_uint64),
        ("writable", c_uint32), ("sparse", c_uint16), ("argument", c_uint16), ("name", c_char_p), ("written", c_void_p),
    )  # fmt: skip # a table


class SassLaunch(Structure):
    _fields_ = (
        ("grid", c_uint32 * 3), ("threads", c_uint32 * 3), ("cluster", c_uint32 * 3),
        ("shared_bytes", c_uint32), ("reserved_shared", c_uint32), ("local_bytes", c_uint32), ("registers", c_uint32),
        ("arch", c_uint32), ("barriers", c_uint32), ("mbarriers", c_uint32),
        ("bank_count", c_uint32), ("allocation_count", c_uint32),
        ("banks", POINTER(SassBank)), ("allocations", POINTER(SassAllocation)), ("seed", c_uint64),
    )  # fmt: skip # a table
