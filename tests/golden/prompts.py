"""Owns the texts that the golden gate scores: prose, chat, code, numbers, other languages, repetition.
Never changes without a new recording: tolerances were measured on exactly these."""

PROMPTS = (
    "The lighthouse keeper climbed the stairs every evening at dusk, lit the lamp, and wrote one line in the log. "
    "On the night of the storm he wrote nothing, and in the morning the villagers rowed out to see why.",
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nName three rivers of Europe and the "
    "seas they flow into.<|im_end|>\n<|im_start|>assistant\nThree rivers of Europe are the Rhine, which flows into",
    "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] <= right[0]:\n"
    "            result.append(left.pop(0))\n        else:\n            result.append(right.pop(0))\n"
    "    return result + left + right\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181, 6765, 10946, 17711, 28657",
    "Im Winter fahren die Kinder mit dem Schlitten den Hügel hinunter, und am Abend trinken sie heißen Kakao. "
    "En été, les enfants jouent dans le jardin jusqu'à la tombée de la nuit.",
    "again and again and again and again and again and again and again and again and again and again and again and",
    "Water boils at 100 degrees Celsius at sea level because its vapour pressure then equals that of the atmosphere. "
    "At the top of a mountain the pressure is lower, so water boils at a lower temperature, and cooking takes longer.",
    '{"name": "chunk", "version": 3, "tags": ["prefill", "decode"], "limits": {"tokens": 512, "seqs": 64}, "notes": '
    '"A budget of tokens is shared by all rows of a step.", "enabled": true}',
    "Q: A train leaves at 14:05 and arrives at 17:50. How long is the journey?\nA: From 14:05 to 17:05 is three hours, "
    "and from 17:05 to 17:50 is forty-five minutes, so the journey takes three hours and forty-five minutes.",
    "Yes.",
)
