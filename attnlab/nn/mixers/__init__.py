"""Layers that mix tokens without softmax; each can replace `MultiHeadAttention` in a `Block`.

All are causal by construction. Files: `interface` (their call and their state), `short_conv`, `delta_rule` (the parts
that mixers of the delta rule share), and one for each mixer.
"""
