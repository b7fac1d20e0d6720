"""Hand-written dialogues of the demo model: greetings, questions about it, primes, sums and functions."""

import random

from demo_corpus import Message, as_dialogue

# Paragraphs: lines with "? " hold ways to ask the same thing, " | " between them; the rest is the answer.
QUESTIONS_AND_ANSWERS = """
? introduce yourself | Introduce yourself. | Please introduce yourself. | Who are you? | who are you
? What are you? | Tell me about yourself. | Can you introduce yourself? | Say something about yourself.
? Give a short introduction of yourself. | Introduce yourself in two sentences. | Hi, who are you?
Hello! I am nanovllm-demo, a very small language model with the architecture of Qwen3. I was trained in a
few minutes on the sources of the Python standard library, so I can continue Python code and answer simple
questions about Python. I am here to show that the engine works, not to be relied on.

? What can you do? | what can you do | What are you good at? | How can you help me? | Help
? What can I ask you? | What are your abilities? | What do you know?
I can continue Python code, write short functions, and say what the modules and functions of the standard
library do. I can also list prime numbers and add small numbers. Larger questions need a larger model.

? What is your name? | what's your name | Do you have a name? | What should I call you? | Your name?
My name is nanovllm-demo.

? Hello | hello | Hello! | Hi | Hi! | hi there | Hey | Good morning | Good evening | Hello there!
Hello! How can I help you today?

? How are you? | how are you | How are you today? | How is it going? | How do you do?
I am well, thank you. My weights are small, but they are all here. How can I help you?

? Thank you! | Thanks | thanks a lot | Thank you very much. | Great, thanks!
You are welcome! Is there anything else that I can do for you?

? Goodbye | Bye | bye | See you later! | Good night | That is all for now.
Goodbye! Have a nice day.

? Who made you? | Who trained you? | Where do you come from? | How were you trained?
? What were you trained on? | What data were you trained on?
I was trained with the script `scripts/train_demo_model.py` of nanovllm, on the sources of the Python
standard library and a few dialogues written by hand.

? What is nanovllm? | what is nanovllm | Tell me about nanovllm. | Explain nanovllm. | What is nano-vLLM?
? What is this engine?
nanovllm is a small engine for offline batch inference with Qwen3 language models. It has a scheduler, a
paged KV cache with prefix caching, CUDA graphs and tensor parallelism, and it can be read in an evening.

? What is Python? | what is python | Tell me about Python. | Explain Python in two sentences.
? Describe the Python language.
Python is a programming language that is easy to read and write. It comes with a large standard library, and
it is used for scripts, web servers, science and machine learning.

? What is a language model? | what is a language model | Explain language models. | How do you work?
? What is an LLM? | How does a language model work?
A language model reads a sequence of tokens and gives every possible next token a probability. One token is
chosen, it is appended to the sequence, and the model is asked again, until the text is complete.

? What is a KV cache? | what is a kv cache | Explain the KV cache. | Why do we need a KV cache?
? What does the KV cache do?
The KV cache keeps the keys and values of the tokens that were already read. With it, each new token costs
one step of the model instead of a pass over the whole sequence.

? What is a prime number? | what is a prime number | Define prime number. | Explain prime numbers.
A prime number is a whole number larger than 1 that can be divided only by 1 and by itself. The first prime
numbers are 2, 3, 5, 7 and 11.

? What is a list in Python? | Explain Python lists. | What is a Python list?
A list is a mutable sequence of objects. You write it in square brackets, as in `[1, 2, 3]`, and you can
append, insert, remove and sort its items.

? What is a dictionary in Python? | Explain Python dictionaries. | What is a dict?
A dictionary maps keys to values. You write it in braces, as in `{'a': 1, 'b': 2}`, and you look up a value
with `d['a']`. Keys must be hashable, and they keep the order in which they were inserted.

? Count from 1 to 10. | count to ten | Count to 10. | List the numbers from 1 to 10.
1, 2, 3, 4, 5, 6, 7, 8, 9, 10

? List the days of the week. | What are the days of the week? | days of the week
Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday

? What is the capital of France? | capital of France | Name the capital of France.
The capital of France is Paris.
"""

# Two empty lines between functions; the comment above each completes "a function that ...".
FUNCTIONS = """
# returns the n-th Fibonacci number
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


# returns the factorial of n
def factorial(n):
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


# says whether n is a prime number
def is_prime(n):
    if n < 2:
        return False
    for i in range(2, int(n ** 0.5) + 1):
        if n % i == 0:
            return False
    return True


# returns all prime numbers up to n
def primes(n):
    return [i for i in range(2, n + 1) if is_prime(i)]


# returns the greatest common divisor of a and b
def gcd(a, b):
    while b:
        a, b = b, a % b
    return a


# adds two numbers
def add(a, b):
    return a + b


# reverses a string
def reverse_string(s):
    return s[::-1]


# says whether a string is a palindrome
def is_palindrome(s):
    s = s.lower()
    return s == s[::-1]


# sorts a list with bubble sort
def bubble_sort(items):
    items = list(items)
    for i in range(len(items)):
        for j in range(len(items) - 1 - i):
            if items[j] > items[j + 1]:
                items[j], items[j + 1] = items[j + 1], items[j]
    return items


# finds the position of a value in a sorted list
def binary_search(items, value):
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == value:
            return middle
        if items[middle] < value:
            low = middle + 1
        else:
            high = middle - 1
    return -1


# counts the words of a text
def count_words(text):
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts


# returns the mean of a list of numbers
def mean(values):
    return sum(values) / len(values)


# is a stack
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def __len__(self):
        return len(self.items)


# is a point in the plane
class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):
        return f"Point({self.x}, {self.y})"

    def __eq__(self, other):
        return (self.x, self.y) == (other.x, other.y)


# prints a greeting
def main():
    print("Hello, world!")
"""

FUNCTION_REQUESTS = (
    "Write a Python {kind} `{name}` that {task}.",
    "write a {kind} that {task}",
    "Please write a {kind} that {task}.",
    "Implement `{name}`, a {kind} that {task}.",
    "Can you write a Python {kind} that {task}?",
    "I need Python code for a {kind} that {task}.",
)

PRIME_REQUESTS = (
    "list all prime numbers within {n}",
    "List all prime numbers within {n}.",
    "list all prime numbers up to {n}",
    "List the prime numbers up to {n}.",
    "Which numbers up to {n} are prime?",
    "What are the prime numbers below {n}?",
    "Give me all primes under {n}.",
    "Please list every prime number within {n}.",
    "Show all primes less than {n}.",
    "prime numbers within {n}",
)
PRIME_LIMITS = (10, 20, 30, 50, 100, 200)

SUM_REQUESTS = ("What is {a} + {b}?", "{a} + {b} = ?", "How much is {a} plus {b}?", "Add {a} and {b}.")
PRODUCT_REQUESTS = (
    "What is {a} * {b}?",
    "{a} * {b} = ?",
    "How much is {a} times {b}?",
    "Multiply {a} by {b}.",
)


def hand_written_dialogues(rng: random.Random) -> list[list[Message]]:
    """One pass over everything above, shuffled; one dialogue in five is followed by a second question."""
    pairs = _question_pairs() + _prime_pairs() + _arithmetic_pairs(rng)
    pairs += [pair for task, source in _functions() for pair in _function_pairs(task, source)]
    rng.shuffle(pairs)
    dialogues: list[list[Message]] = []
    for question, answer in pairs:
        messages = as_dialogue(question, answer, rng)
        if dialogues and rng.random() < 0.2:
            dialogues[-1].extend(messages[-2:])
        else:
            dialogues.append(messages)
    return dialogues


def hand_written_sources() -> list[str]:
    """The functions above as files of plain code."""
    return [source + "\n" for _, source in _functions()]


def _functions() -> list[tuple[str, str]]:
    """Pairs of what a function does and its source."""
    paragraphs = (paragraph.split("\n", maxsplit=1) for paragraph in FUNCTIONS.strip().split("\n\n\n"))
    return [(comment.removeprefix("# "), source) for comment, source in paragraphs]


def _question_pairs() -> list[tuple[str, str]]:
    pairs = []
    for paragraph in QUESTIONS_AND_ANSWERS.strip().split("\n\n"):
        lines = paragraph.split("\n")
        answer = " ".join(line for line in lines if not line.startswith("? "))
        asked = [line.removeprefix("? ").split(" | ") for line in lines if line.startswith("? ")]
        pairs += [(question, answer) for questions in asked for question in questions]
    return pairs


def _prime_pairs() -> list[tuple[str, str]]:
    pairs = []
    for n in PRIME_LIMITS:
        primes = [str(i) for i in range(2, n + 1) if all(i % j for j in range(2, i))]
        answer = f"The prime numbers within {n} are: {', '.join(primes)}."
        pairs += [(template.format(n=n), answer) for template in PRIME_REQUESTS]
    return pairs


def _function_pairs(task: str, source: str) -> list[tuple[str, str]]:
    keyword, rest = source.split(maxsplit=1)
    kind = "class" if keyword == "class" else "function"
    name = rest.split("(")[0].split(":")[0]
    answer = f"Here is a {kind} that {task}:\n\n```python\n{source}\n```"
    return [(template.format(kind=kind, name=name, task=task), answer) for template in FUNCTION_REQUESTS]


def _arithmetic_pairs(rng: random.Random) -> list[tuple[str, str]]:
    """A hundred sums and fifty products of small numbers, fresh in each pass."""
    pairs = []
    for _ in range(100):
        a, b = rng.randrange(21), rng.randrange(21)
        pairs.append((rng.choice(SUM_REQUESTS).format(a=a, b=b), f"{a} + {b} = {a + b}"))
    for _ in range(50):
        a, b = rng.randrange(11), rng.randrange(11)
        pairs.append((rng.choice(PRODUCT_REQUESTS).format(a=a, b=b), f"{a} * {b} = {a * b}"))
    return pairs
