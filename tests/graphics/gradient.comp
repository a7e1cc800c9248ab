#version 450
// Each texel has its own place for its colour. Compiled by `make shaders`.
layout(local_size_x = 8, local_size_y = 8) in;
layout(rgba32f, binding = 0) uniform writeonly image2D texels;

void main() {
    ivec2 at = ivec2(gl_GlobalInvocationID.xy);
    if (all(lessThan(at, imageSize(texels)))) imageStore(texels, at, vec4(at, at.x * at.y, 1.0));
}
