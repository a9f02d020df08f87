"""What each command does, from a folder and settings to finished files.

Folders, clocks and people are met here; the loops and formulas below know nothing of them. No
module here imports torch at its top.
"""
