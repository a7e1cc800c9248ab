"""``gpuinterop bench``: what calls and frames cost, each beside the same by hand."""
