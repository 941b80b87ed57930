"""Prompt data sets: sources, chat templating, tokenising, cursors. Needs neither torch nor transformers.

`relaxd.data.dataset` and what it uses need the packages `tokenizers` and `jinja2` (extra [coordinator]);
`relaxd.data.models` and `relaxd.data.errors` need nothing, so every service can import those.
"""
