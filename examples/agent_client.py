"""For an agent builder: the `openai` client, and two lines that keep the context short.

Start a server first: kvfunc serve
"""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "system", "content": "You look things up. Answer briefly."}]


def ask(question: str, found: str) -> str:
    """One round: a question, and the tool output that answers it."""
    messages.append({"role": "user", "content": question})
    messages.append({"role": "tool", "content": found, "tool_call_id": str(len(messages))})
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=24, temperature=0,
        extra_body={"cache": {"policy": {
            "type": "rolling_tool_outputs",  # the text stays in `messages`; the cache forgets it
            "keep": 2, "reposition_above_tokens": 400}}})
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    details = answer.usage.prompt_tokens_details.model_dump()
    print(f"{question:28} prompt {answer.usage.prompt_tokens:4}, {details}")
    return messages[-1]["content"]


if __name__ == "__main__":
    for place, metres in (("Everest", 8849), ("K2", 8611), ("Lhotse", 8516), ("Makalu", 8485)):
        ask(f"How high is {place}?", f"{place} is {metres} metres high. " * 12)
