"""Key-value memory in pages, and attention over it.

A layer's keys and values lie in a pool of pages of equal size; a sequence is a table of page numbers.
Attention reads through the tables, so that nothing is padded to the longest sequence and nothing moves
when a sequence begins, grows or ends.
"""
