"""CPU kernels: C with run-time instruction dispatch, called through ctypes.

`native` finds, compiles and loads the library; `attention`, `elementwise` and `gemm` are its
launchers. Each launcher checks shapes and types once, then passes plain pointers. Where there is
no library (no compiler and no prebuilt one) they fall back to torch, see `ops.reference`.
"""
