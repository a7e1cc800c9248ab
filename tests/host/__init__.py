"""Tests of the host backend on its own: formats, ownership, streams; against the software Vulkan drivers."""
