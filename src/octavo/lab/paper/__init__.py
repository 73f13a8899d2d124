"""The figures of the PagedAttention paper (Kwon et al., SOSP 2023), made again by the simulator.

`workloads` finds the lengths and makes requests of them, `systems` says how each system is set up,
`protocol` measures, `reference` has the paper's values, one module a group of figures says what to
run and what to compare, and `runner` does it with several processes.
"""
