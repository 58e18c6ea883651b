"""The pure rules of each kind of stream: records that follow from settled ones, or that rows need at a moment.

This package does no input or output. The reactor of a gateway applies the rules. No kind of stream imports it.
"""
