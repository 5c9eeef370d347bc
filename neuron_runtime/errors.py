"""Status codes of the Neuron runtime and the two error types of this package.

Codes and names follow ``NRT_STATUS`` of ``nrt/nrt_status.h`` in the AWS Neuron SDK.
"""

from __future__ import annotations

from enum import IntEnum


class NRT_STATUS(IntEnum):  # noqa: N801 - the SDK's own name
    """Result of a runtime call."""

    NRT_SUCCESS = 0
    NRT_FAILURE = 1
    NRT_INVALID = 2
    NRT_INVALID_HANDLE = 3
    NRT_RESOURCE = 4
    NRT_TIMEOUT = 5
    NRT_HW_ERROR = 6
    NRT_QUEUE_FULL = 7
    NRT_LOAD_NOT_ENOUGH_NC = 9
    NRT_UNSUPPORTED_NEFF_VERSION = 10
    NRT_FAIL_HOST_MEM_ALLOC = 11
    NRT_UNINITIALIZED = 13
    NRT_CLOSED = 14
    NRT_QUEUE_EMPTY = 15
    NRT_EXEC_UNIT_UNRECOVERABLE = 101
    NRT_EXEC_BAD_INPUT = 1002
    NRT_EXEC_COMPLETED_WITH_NUM_ERR = 1003
    NRT_EXEC_COMPLETED_WITH_ERR = 1004
    NRT_EXEC_NC_BUSY = 1005
    NRT_EXEC_OOB = 1006
    NRT_COLL_PENDING = 1100
    NRT_EXEC_HW_ERR_COLLECTIVES = 1200
    NRT_EXEC_HW_ERR_HBM_UE = 1201
    NRT_EXEC_HW_ERR_NC_UE = 1202
    NRT_EXEC_HW_ERR_DMA_ABORT = 1203
    NRT_EXEC_SW_NQ_OVERFLOW = 1204
    NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE = 1205
    NRT_NETWORK_PROXY_FAILURE = 1206


class NrtError(RuntimeError):
    """A runtime call failed. ``status`` is the code, ``detail`` the text without the prefix."""

    def __init__(self, status: NRT_STATUS | int, detail: str) -> None:
        self.status = NRT_STATUS(status)
        self.detail = detail
        super().__init__(f"NRT Error {self.status.name}({int(self.status)}): {detail}")

    def __reduce__(self) -> tuple[type[NrtError], tuple[int, str]]:
        return type(self), (int(self.status), self.detail)


class CompileError(RuntimeError):
    """The compiler refuses its input.

    ``code`` follows the style of neuronx-cc: EARG (arguments), EVRF (the program breaks a rule),
    EUOC (unsupported operator), EIMP (the importer cannot read the input), ECCH (cache).
    """

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        self.detail = detail
        super().__init__(f"[{code}] {detail}")

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str]]:
        return type(self), (self.code, self.detail)
