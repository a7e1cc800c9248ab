"""What Vulkan and OpenGL have in common."""
