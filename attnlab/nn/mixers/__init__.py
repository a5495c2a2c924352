"""Layers that mix tokens without softmax; each can replace `MultiHeadAttention` in a `Block`.

All are causal by construction. Files: `interface` (the call and the state of all mixers), `short_conv`, `delta_rule`
and `gates` (parts that several mixers share), and one file for each mixer.
"""
