"""The family `simple`: a target without attention, and a draft that denoises its block in several steps.

spec.py           what the two compute, and the unmasking schedule
checkpoint.py     the format on disk: config.json and safetensors, read and written
seed.py           the pair of the seed program: its sizes and its random arrays
modules.py        both networks in deployment form, the denoising unrolled; they run eagerly too
pair.py           the family as `export_bundle` sees it
describe.py       what `dflash inspect` says about its checkpoints
"""
