"""What an engine has and bears: sites, facts such as layers and width, limits of tensors.

In: nothing of a request. Out: what requests are judged against. Read `_sites.py` first.
"""
