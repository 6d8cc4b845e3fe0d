"""Seeded generator of dialogues in which facts are stated early and asked for later.

One seed gives one dialogue. Training uses seeds below ``HELD_OUT_SEED`` and evaluation seeds from it on;
made-up words are split as well (see ``vocabulary``), so that a held-out dialogue asks for words that the
model has never seen. How users wrap their sentences is in ``text/phrasing.toml``.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from assets.training import chatter
from assets.training.facts import Fact, draw_fact, with_new_value
from assets.training.vocabulary import Draw, load

HELD_OUT_SEED = 1 << 40
NOT_TOLD = "You have not told me that yet."
_PHRASING = load("phrasing.toml")


@dataclass(frozen=True)
class Message:
    """``learn`` says whether the loss on the message counts in training. It is only ever true for assistant
    messages."""

    role: str
    content: str
    learn: bool = False


def _fill(template: str, sentence: str) -> str:
    """Fills a template: ``{f}`` is the sentence, ``{l}`` has a lower-case start, ``{n}`` and ``{ln}`` also end with
    "now"."""

    def lower_first(text: str) -> str:
        return text if text.startswith(("I ", "I'")) else text[0].lower() + text[1:]

    now = sentence.removesuffix(".") + " now."
    return template.format(f=sentence, l=lower_first(sentence), n=now, ln=lower_first(now))


@dataclass
class Dialogue:
    """A dialogue under construction: what was said and what is true in it now.

    ``casual`` users type in lower case. Without ``echo`` the replies do not repeat a fact.
    """

    draw: Draw
    messages: list[Message] = field(default_factory=list)
    known: dict[tuple[str, str], Fact] = field(default_factory=dict)
    casual: bool = False
    echo: bool = True

    def _add(self, user: str, assistant: str, learn: bool = True) -> None:
        if self.casual:
            user = user.lower().rstrip(".?!")
        self.messages.append(Message("user", user))
        self.messages.append(Message("assistant", assistant, learn))

    def _tell(self, stated: list[Fact], sentence: str, opener: str) -> None:
        for fact in stated:
            self.known[fact.key] = fact
        if self.echo:
            self._add(sentence, " ".join([opener, *(fact.answer for fact in stated)]))
        else:
            self._add(sentence, self.draw.one_of(_PHRASING["plain_reply"]), learn=False)

    def _new_fact(self) -> Fact:
        fact = draw_fact(self.draw)
        return fact.lower() if self.casual else fact

    def state_new(self) -> Fact:
        """The user states a fact, sometimes two at once. Returns the first."""
        draw = self.draw
        fact = self._new_fact()
        template, opener = draw.rng.choice(_PHRASING["introduce"])
        stated, sentence = [fact], fact.statement(draw)
        if draw.chance(0.15):
            other = self._new_fact()
            if other.key != fact.key:
                joint, second = draw.rng.choice([(" ", "{f}"), (" and ", "{l}"), (" Also, ", "{l}")])
                head = sentence.removesuffix(".") if joint == " and " else sentence
                sentence = head + joint + _fill(second, other.statement(draw))
                stated.append(other)
        self._tell(stated, _fill(template, sentence), opener)
        return fact

    def update(self, fact: Fact) -> Fact:
        new = with_new_value(self.draw, fact)
        if self.casual:
            new = new.lower()
        self._tell([new], _fill(self.draw.one_of(_PHRASING["update"]), new.statement(self.draw)), "Updated.")
        return new

    def _question(self, fact: Fact) -> str:
        return _fill(self.draw.one_of(_PHRASING["ask"]), fact.question(self.draw))

    def ask(self, fact: Fact) -> None:
        self._add(self._question(fact), fact.answer)

    def ask_two(self, first: Fact, second: Fact) -> None:
        question = first.question(self.draw)
        joined = _fill(self.draw.one_of(_PHRASING["ask_second"]), second.question(self.draw))
        self._add(f"{question} {joined}", f"{first.answer} {second.answer}")

    def ask_untold(self) -> None:
        fact = self._new_fact()
        if fact.key not in self.known:
            self._add(self._question(fact), NOT_TOLD)

    def chat(self) -> None:
        user, assistant = chatter.exchange(self.draw)
        if self.casual:
            user, assistant = chatter.fixed(self.draw)
        self._add(user, assistant)


def _begin(seed: int) -> Dialogue:
    dialogue = Dialogue(Draw(random.Random(seed), held_out=seed >= HELD_OUT_SEED))
    if dialogue.draw.chance(0.25):
        dialogue.messages.append(Message("system", dialogue.draw.one_of(_PHRASING["system"])))
    return dialogue


def _next_turn(dialogue: Dialogue, p_fact: float, p_chat: float) -> None:
    rng = dialogue.draw.rng
    known = list(dialogue.known.values())
    choice = rng.random()
    if choice < p_chat:
        dialogue.chat()
    elif choice < p_chat + p_fact * (1 - p_chat) or not known:
        if known and rng.random() < 0.15:
            dialogue.update(rng.choice(known))
        else:
            dialogue.state_new()
    elif rng.random() < 0.08:
        dialogue.ask_untold()
    elif len(known) > 1 and rng.random() < 0.06:
        dialogue.ask_two(*rng.sample(known, 2))
    else:
        dialogue.ask(rng.choice(known))


def _round(dialogue: Dialogue) -> None:
    """Facts told once, long chatter, then one question for every known fact: the hardest recall."""
    rng = dialogue.draw.rng
    for _ in range(rng.randint(3, 8)):
        dialogue.state_new()
        if rng.random() < 0.15:
            dialogue.update(rng.choice(list(dialogue.known.values())))
    for _ in range(rng.randint(6, 30)):
        dialogue.chat()
    known = list(dialogue.known.values())
    for fact in rng.sample(known, len(known)):
        dialogue.ask(fact)
    dialogue.ask_untold()


def training_dialogue(seed: int, far: bool = False) -> Iterator[Message]:
    """Messages without end. The caller stops when its sequence is full.

    Dialogues differ in the number of facts, in the amount of chatter, in whether the user types casually, and in
    whether the replies repeat each fact. Replies that do not repeat it stand for other systems and are not learned.
    With ``far`` the dialogue goes in rounds of telling, chatting and asking.
    """
    if seed >= HELD_OUT_SEED:
        raise ValueError("seed belongs to the held-out side")
    dialogue = _begin(seed)
    rng = dialogue.draw.rng
    dialogue.casual = rng.random() < 0.08
    dialogue.echo = rng.random() < 0.8
    p_fact, p_chat = rng.uniform(0.08, 0.35), rng.uniform(0.05, 0.5)
    sent = 0
    while True:
        if far:
            _round(dialogue)
        else:
            _next_turn(dialogue, p_fact, p_chat)
        yield from dialogue.messages[sent:]
        sent = len(dialogue.messages)


@dataclass(frozen=True)
class RecallCase:
    """A held-out dialogue: the user's messages, the fact asked for, and where it was stated.

    The model under test answers every turn itself. ``references`` are the generator's own replies; the last one answers
    the question that counts. ``stated_turn`` and ``asked_turn`` are numbers of user messages.
    """

    seed: int
    kind: str
    system: str | None
    user_messages: tuple[str, ...]
    references: tuple[str, ...]
    expected: str
    stated_turn: int
    asked_turn: int
    updated: bool


def recall_case(seed: int, min_turns: int = 10, filler_turns: tuple[int, int] = (16, 30)) -> RecallCase:
    """A dialogue with facts, possibly an update, then chatter and other questions, then the question that counts."""
    dialogue = _begin(HELD_OUT_SEED + seed)
    rng = dialogue.draw.rng
    system = dialogue.messages.pop().content if dialogue.messages else None
    for _ in range(rng.randint(0, 2)):
        dialogue.chat()
    target = dialogue.state_new()
    for _ in range(rng.randint(1, 5)):
        dialogue.state_new()
    target = dialogue.known[target.key]
    updated = rng.random() < 0.2
    if updated:
        target = dialogue.update(target)
    stated_turn = max(i for i, m in enumerate(dialogue.messages[::2]) if target.value in m.content)
    others = [fact for fact in dialogue.known.values() if fact.key != target.key]
    for _ in range(max(min_turns, rng.randint(*filler_turns))):
        if others and rng.random() < 0.2:
            dialogue.ask(rng.choice(others))
        else:
            dialogue.chat()
    dialogue.ask(target)
    users = tuple(message.content for message in dialogue.messages[::2])
    replies = tuple(message.content for message in dialogue.messages[1::2])
    return RecallCase(
        seed,
        target.kind.name,
        system,
        users,
        replies,
        target.value,
        stated_turn,
        len(users) - 1,
        updated,
    )
