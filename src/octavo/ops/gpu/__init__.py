"""GPU kernels in Triton, each beside its launcher; `octavo.ops.reference` has the formulas."""
