"""Turns that carry no fact: greetings, sums, counting, copying, small talk, short lessons.

Each function returns one exchange, the user's message and the reply. Replies are a fixed function of the
message, so that a small model learns them quickly and keeps its capacity for recall. The texts are in
``text/talk.toml``.
"""

from collections.abc import Callable

from assets.training.vocabulary import LISTS, Draw, load

Exchange = tuple[str, str]
_TALK = load("talk.toml")
_MOODS: list[tuple[str, str]] = list(_TALK["moods"].items())
_LESSONS: list[tuple[str, list[str]]] = list(_TALK["lessons"].items())
_CAPITALS = dict(zip(LISTS["countries"], LISTS["capitals"], strict=True))


def _form(draw: Draw, name: str) -> str:
    return draw.one_of(_TALK[name])


def fixed(draw: Draw) -> Exchange:
    entry = draw.rng.choice(_TALK["fixed"])
    return draw.one_of(entry["messages"]), entry["reply"]


def lesson(draw: Draw) -> Exchange:
    topic, sentences = draw.rng.choice(_LESSONS)
    return _form(draw, "lesson_requests").format(t=topic), " ".join(sentences)


def story(draw: Draw) -> Exchange:
    """What the user did, with names as distractors. The last sentence decides the reply."""
    mood, reply = draw.rng.choice(_MOODS)
    parts = [f"{_form(draw, 'when')} I {_form(draw, 'outings')} and {_form(draw, 'then')}."]
    if draw.chance(0.6):
        parts.append(_form(draw, "weather"))
    if draw.chance(0.4):
        name = draw.mixed(LISTS["first_names"], draw.name)
        parts.append(_form(draw, "met").format(n=name))
    if draw.chance(0.5):
        parts.append(f"Then I {_form(draw, 'outings')} and {_form(draw, 'then')}.")
    return " ".join([*parts, mood]), reply


def sum_up(draw: Draw) -> Exchange:
    """Addition and subtraction up to 20, the small multiplication table."""
    rng = draw.rng
    sign = rng.choice(["+", "+", "-", "*"])
    if sign == "*":
        a, b = rng.randint(1, 10), rng.randint(1, 10)
        result, name = a * b, "times"
    else:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        if sign == "-":
            a, b = max(a, b), min(a, b)
        result, name = (a + b, "plus") if sign == "+" else (a - b, "minus")
    return _form(draw, "sums").format(a=a, b=b, n=name, s=sign), f"{a} {name} {b} is {result}."


def count_on(draw: Draw) -> Exchange:
    start = draw.rng.randint(0, 99)
    reply = f"After {start} come {', '.join(str(start + i) for i in range(1, 6))}."
    if draw.chance(0.5):
        return _form(draw, "count_from").format(a=start), reply
    before = min(start, draw.rng.randint(1, 4))
    seen = ", ".join(str(number) for number in range(start - before, start + 1))
    return _form(draw, "count_seen").format(seen=seen), reply


def copy_words(draw: Draw) -> Exchange:
    """Repeating a few arbitrary words, the purest training for recall."""
    makers: tuple[Callable[[], str], ...] = (draw.code, draw.word, lambda: draw.listed("nouns"))
    text = " ".join(draw.rng.choice(makers)() for _ in range(draw.rng.randint(1, 6)))
    return _form(draw, "copy").format(t=text), f"You said: {text}"


def knowledge(draw: Draw) -> Exchange:
    """The few facts that the model knows: capitals, days, months."""
    choice = draw.rng.random()
    if choice < 0.5:
        country = draw.listed("countries")
        return (
            _form(draw, "capital").format(c=country),
            f"The capital of {country} is {_CAPITALS[country]}.",
        )
    names, noun = (LISTS["days"], "day") if choice < 0.75 else (LISTS["months"], "month")
    index = draw.rng.randrange(len(names))
    if draw.chance(0.5):
        following = names[(index + 1) % len(names)]
        return f"Which {noun} comes after {names[index]}?", f"After {names[index]} comes {following}."
    return f"Which {noun} comes before {names[index]}?", f"Before {names[index]} comes {names[index - 1]}."


def unknown(draw: Draw) -> Exchange:
    """A question about the world that the model cannot know, and a short, honest answer."""
    word = draw.word()
    message = _form(draw, "unknown").format(
        x=word,
        X=word.capitalize(),
        n=draw.listed("nouns"),
        m=draw.listed("nouns"),
        c=draw.listed("colours"),
        C=draw.listed("cities"),
        D=draw.listed("cities"),
        N=draw.listed("first_names"),
        L=draw.listed("languages"),
        K=draw.listed("countries"),
        s=draw.listed("sports"),
        y=draw.rng.randint(1900, 2025),
    )
    return message, _TALK["dont_know"]


MAKERS: tuple[tuple[Callable[[Draw], Exchange], float], ...] = (
    (fixed, 2.0),
    (lesson, 1.5),
    (story, 2.0),
    (sum_up, 2.0),
    (count_on, 1.0),
    (copy_words, 2.0),
    (knowledge, 1.0),
    (unknown, 1.0),
)


def exchange(draw: Draw) -> Exchange:
    """One exchange of a random kind."""
    makers = [maker for maker, _ in MAKERS]
    weights = [weight for _, weight in MAKERS]
    return draw.rng.choices(makers, weights)[0](draw)
