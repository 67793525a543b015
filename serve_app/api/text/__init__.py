"""Turns text into token ids and back for one model, with its chat template and tokenizer, and finds stop strings.

Start with `tokenizer`. `chat_template` renders a conversation, after `system_turns`, `turns_in_a_row` and
`result_order` have arranged it in an order that the template takes. `detokenizer` turns an answer's tokens into text.
"""
