"""The record of a run as a page.

page.py         the figures, and the page put together
page.html.j2    its text, tables and the bars that need no plot
"""
