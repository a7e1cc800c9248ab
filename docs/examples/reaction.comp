#version 450
// One step of Gray and Scott's reaction and diffusion. Compiled by `make shaders`.
layout(local_size_x = 16, local_size_y = 16) in;
layout(push_constant) uniform Step { int size; int source; float feed; float kill; };
layout(std430, binding = 0) buffer Field { vec2 cells[]; };  // two fields, one behind the other: read one, write the other

vec2 at(int x, int y) {
    x = (x + size) % size;
    y = (y + size) % size;
    return cells[source * size * size + y * size + x];
}

void main() {
    int x = int(gl_GlobalInvocationID.x), y = int(gl_GlobalInvocationID.y);
    if (x >= size || y >= size) return;
    vec2 here = at(x, y);
    vec2 near = at(x - 1, y) + at(x + 1, y) + at(x, y - 1) + at(x, y + 1);
    vec2 far = at(x - 1, y - 1) + at(x + 1, y - 1) + at(x - 1, y + 1) + at(x + 1, y + 1);
    vec2 spread = 0.2 * near + 0.05 * far - here;
    float reaction = here.x * here.y * here.y;
    vec2 change = vec2(spread.x - reaction + feed * (1.0 - here.x),
                       0.5 * spread.y + reaction - (kill + feed) * here.y);
    cells[(1 - source) * size * size + y * size + x] = here + change;
}
