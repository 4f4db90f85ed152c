"""Published results repeated on real models, each by one command: `python -m gallery NAME`.

A replication measures and shows: `measure` runs a model and gives numbers, and `show` makes the
verdict, the tables and the figure of them. Pages and figures of the documentation are made of the
numbers in `gallery/results` by `python -m tests.kit.generated`.
"""

from gallery._page import replication_files, replication_link, replications_markdown

__all__ = ["replication_files", "replication_link", "replications_markdown"]
