"""From a bundle's graphs to TensorRT engines in the bundle. Loads no torch.

    options.py      what the user may choose, and the checks of it
    backends.py     the two TensorRT flavours: packages, GPU generations, what they cannot do
    graph.py        the graph an engine is built from: axes fixed, functions inlined
    plan.py         limits, profiles, and estimates of memory and disk
    job.py          what the builder process is told, and what it tells
    worker.py       the builder process: the only module that loads TensorRT
    process.py      starts the builder process and listens to it
    build.py        all of it in turn, and the engines into the bundle, whole or not at all

Importing this package loads nothing of the sort.
"""
