"""``gpuinterop bench``: what calls, frames and sharing cost, each beside the same by hand."""
