"""Parts of drafts in plain torch that run eagerly, to build drafts with and to check deployment forms.

dflash.py      the DFlash decoder layer: attention over the context's and the block's rows
dflash2.py     what DFlash2 adds: local convolutions around both sublayers, and the candidate selector
"""
