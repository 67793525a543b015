"""Text to token ids and back, for one model: its chat template, its tokenizer, and the search for stop strings.

`tokenizer` is the entry. `chat_template` renders a conversation, once `system_turns`, `turns_in_a_row` and
`result_order` have brought it into the order that the template takes. `detokenizer` turns an answer's tokens into text.
"""
