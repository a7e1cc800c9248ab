#version 450
// Lights a field of heights from one side, and writes it into an image. Compiled by `make shaders`.
layout(local_size_x = 16, local_size_y = 16) in;
layout(push_constant) uniform Size { int size; };
layout(std430, binding = 0) readonly buffer Field { float heights[]; };
layout(rgba8, binding = 1) uniform writeonly image2D picture;

float at(int x, int y) {
    return heights[(y + size) % size * size + (x + size) % size];
}

void main() {
    int x = int(gl_GlobalInvocationID.x), y = int(gl_GlobalInvocationID.y);
    if (x >= size || y >= size) return;
    float slope = at(x + 1, y) - at(x - 1, y) + at(x, y + 1) - at(x, y - 1);
    float light = clamp(0.45 + 5.0 * slope, 0.0, 1.0);
    vec3 colour = mix(vec3(0.01, 0.10, 0.30), vec3(0.80, 0.97, 1.00), clamp(0.4 + 1.2 * at(x, y), 0.0, 1.0));
    imageStore(picture, ivec2(x, y), vec4(colour * (0.25 + 0.75 * light), 1.0));
}
