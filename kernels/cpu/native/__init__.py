"""Operations for CPUs in C++: `program.cpp` and its headers, compiled for this machine by `library`.
Importing this package imports and compiles nothing."""
