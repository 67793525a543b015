"""Operations in C++, and a model's forward pass recorded once: a step is then one call.

`library` compiles `program.cpp` and its headers for this machine, `program` records a model's operations and runs them,
and `sampling` draws tokens. Importing this package imports and compiles nothing.
"""
