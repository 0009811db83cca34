"""Python bindings of the emulated runtime: AscendCL functions, and functions for op kernels.

Errors copy torch_npu's format ("NPU function error: aclrtSynchronizeStream, error code is 107027"), so a user meets the
text of the real device.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p, py_object

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
NOT_ON_CAPTURED_STREAM, CANNOT_UPDATE, KERNEL_FAILED = 107030, 207019, 507015
# results of emulator_acquire
IDLE, HELD_UP, CAPTURING, UPDATING = range(4)

EXECUTE = ctypes.CFUNCTYPE(c_int, c_uint64, c_int, c_int)
FORGET = ctypes.CFUNCTYPE(None, c_uint64)

library = ctypes.CDLL("libascendcl.so")
for _name, _result, _arguments in (
    ("emulator_acquire", c_int, [c_void_p]),
    ("emulator_release", None, [c_void_p]),
    ("emulator_submit", c_int, [c_void_p, c_uint64]),
    ("emulator_stream_id", c_int, [c_void_p]),
    ("emulator_capturing", c_int, [c_void_p]),
    ("emulator_refuse", c_int, [c_void_p, c_int, c_char_p]),
    ("emulator_update_target", c_uint64, [c_void_p]),
    ("emulator_block", c_int, [c_void_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_int)]),
    ("emulator_generation", c_uint64, []),
    ("emulator_poison", c_int, [c_void_p, c_void_p, c_size_t, c_int]),
    ("emulator_poison_freed", None, [c_void_p, c_size_t, c_int]),
    ("emulator_keep_errors", None, [py_object, c_void_p, c_void_p]),
    ("emulator_set_error", None, [c_char_p]),
    ("emulator_set_hooks", None, [EXECUTE, FORGET]),
    ("emulator_trace", None, [c_char_p]),
    ("emulator_tracing", c_int, []),
    ("aclGetRecentErrMsg", c_char_p, []),
    ("aclrtSynchronizeStream", c_int, [c_void_p]),
    ("aclrtMemcpy", c_int, [c_void_p, c_size_t, c_void_p, c_size_t, c_int]),
    ("aclrtMemcpyAsync", c_int, [c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_void_p]),
):
    _function = getattr(library, _name)
    _function.restype, _function.argtypes = _result, _arguments


class DeviceError(RuntimeError):
    """An AscendCL function returned an error code; torch_npu raises the same error."""

    def __init__(self, function: str, code: int, message: str) -> None:
        super().__init__(
            f"NPU function error: {function}, error code is {code}\n[ERROR] ERR00100 PTA call acl api failed\n{message}"
        )
        self.code = code


def check(function: str, code: int) -> None:
    """Raises DeviceError with the runtime's own message unless `code` is 0."""
    if code:
        raise DeviceError(function, code, library.aclGetRecentErrMsg().decode(errors="replace"))


def refuse(stream: int, function: str, code: int, sentence: str) -> None:
    """Breaks the capture of `stream` and raises DeviceError: a graph cannot hold the operation."""
    check(function, library.emulator_refuse(stream, code, sentence.encode()))


def block_of(address: int) -> tuple[int, int, bool] | None:
    """Start and size of the device allocation that holds `address`, and True if a capture allocated it."""
    base, size, captured = c_uint64(), c_uint64(), c_int()
    if not library.emulator_block(address, byref(base), byref(size), byref(captured)):
        return None
    return base.value, size.value, bool(captured.value)
