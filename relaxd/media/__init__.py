"""Content of conversations: messages, and what they show and play.

`messages` is for rewards. The rest takes images, video and sound from data to the model: `placeholders` finds them in
prompts, `sources`, `images`, `videos` and `sounds` read and normalise them, as `kinds` lists, which also caches what it
opens, `media_tokens` says where their tokens are, `prompt_media` stores them with a group, and `patches` turns them
into what the model's towers get.
"""
