"""Measuring: workloads, offline throughput, latency. `octavo bench` is its command line."""
