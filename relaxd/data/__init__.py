"""Prompt data sets: sources, chat templating, tokenising, cursors. Needs neither torch nor transformers.

`relaxd.data.dataset` and what it uses need the packages `tokenizers` and `jinja2` (extra [coordinator]);
`relaxd.models.folders` and `relaxd.models` need nothing, so every service can import them.
"""
