#version 450

// One step of simulation.WaveParameters, in place over the frame before the last.
// `precise` forbids contraction into fused multiply-adds: every driver computes the same float32 values as NumPy.

layout(local_size_x = 16, local_size_y = 16) in;

layout(std430, binding = 0) buffer Field {
    float field[];
};

#ifdef VULKAN
layout(push_constant)
#else
layout(std140, binding = 0)
#endif
uniform Parameters {
    uint width;
    uint height;
    float courant2;
    float damping;
    uint current;  // the slot that is read
    uint next;     // the slot that holds the previous frame and receives the next one
};

void main() {
    uvec2 at = gl_GlobalInvocationID.xy;
    if (at.x >= width || at.y >= height) {
        return;
    }
    uint slot = width * height;
    uint here = at.y * width + at.x;
    uint target = next * slot + here;
    if (at.x == 0 || at.y == 0 || at.x == width - 1 || at.y == height - 1) {
        field[target] = 0.0;
        return;
    }
    uint centre = current * slot + here;
    precise float u = field[centre];
    precise float sum = field[centre - width] + field[centre + width] + field[centre - 1] + field[centre + 1];
    precise float laplacian = sum - 4.0 * u;
    precise float undamped = 2.0 * u - field[target] + courant2 * laplacian;
    precise float result = damping * undamped;
    field[target] = result;
}
