"""The shared implementation for drivers such as CUDA's and HIP's, driven by a table of their differences.

Both drivers are C libraries with the same functions under different prefixes, the same structs and mostly the same
numbers. These modules call the C functions through ctypes, by their names without the prefix. A vendor's package
supplies a `Table`, a `NativeDriver` that loads the library, and the parts of the contract (`gpuinterop.backend`) that
differ. A backend need not use this package.
"""
