"""``gpuinterop bench``: what calls, frames and sharing cost, compared with hand-written code."""
