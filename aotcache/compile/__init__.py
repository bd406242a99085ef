"""From a flat call to a compiled archive. Runs in a builder process, on one thread.

    export_call -> make_pair -> rewrites -> content key -> AOTInductor -> archive

`pipeline.prepare` does everything up to the content key, which tells whether an
identical graph was compiled before; `pipeline.compile_prepared` does the rest. What
a call is, is `graph`'s business; whether the result is right, `certify`'s.
"""
