"""Word lists and seeded samplers of values: names, places, codes, numbers, made-up words.

About half of all values are made up from syllables, so that recalling one is real copying and not
a choice from a known list. Made-up words are split by their checksum: one in eight is *held out*,
is never seen in training, and is the only sort that evaluation draws.
"""

import random
import zlib
from collections.abc import Callable

FIRST_NAMES = (
    "Ana Ben Carla David Emma Felix Grace Henry Iris Jack Kira Leo Maria Noah Olivia Paul Quinn Rosa Sam "
    "Tina Umar Vera Will Xenia Yusuf Zoe Alice Bob Clara Daniel Elena Frank Gina Hugo Ivan Julia Karl Lena "
    "Mark Nina Oscar Petra Ravi Sofia Tom Ursula Victor Wanda Amir Bella Chen Dora Erik Fatima George Hana"
).split()
PET_NAMES = (
    "Rex Max Bella Luna Rocky Milo Coco Daisy Buddy Simba Nala Oreo Pepper Ginger Shadow Misty Tiger Socks "
    "Biscuit Ziggy Bruno Fluffy Spot Snowy Pickle Waffles Mochi Bandit Cookie Toffee Whiskers Olive"
).split()
CITIES = (
    "Paris London Berlin Rome Madrid Lisbon Vienna Prague Oslo Dublin Athens Warsaw Helsinki Tokyo Kyoto "
    "Cairo Lima Quito Boston Chicago Seattle Denver Toronto Sydney Perth Delhi Mumbai Seoul Porto Ghent "
    "Basel Bergen Krakow Nairobi Lagos Havana Istanbul Amsterdam Munich Zurich"
).split()
COLOURS = (
    "red blue green yellow orange purple pink brown black white grey teal crimson violet turquoise gold "
    "silver beige maroon navy scarlet indigo"
).split()
FOODS = (
    "pizza pasta sushi curry soup salad rice bread cheese pancakes tacos noodles lasagne dumplings ramen "
    "chocolate falafel paella risotto stew burgers waffles"
).split()
FRUITS = "apple banana mango cherry pear plum grape kiwi lemon peach melon fig papaya apricot lime".split()
DRINKS = "tea coffee water milk cocoa lemonade juice cider cola ginger-beer".split()
SPORTS = "football tennis chess swimming running cycling hockey rugby golf rowing climbing judo skiing".split()
ANIMALS = "otter fox owl wolf bear tiger lion eagle whale dolphin panda koala badger heron lynx seal".split()
SEASONS = "spring summer autumn winter".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
JOBS = (
    "a nurse|a teacher|a baker|a pilot|a farmer|a lawyer|a doctor|a chef|a plumber|a painter|a gardener|"
    "a carpenter|a dentist|a librarian|a driver|a tailor|an engineer|an architect|an actor|an electrician|"
    "a software engineer|a data scientist|a musician|a journalist"
).split("|")
INSTRUMENTS = "piano guitar violin cello flute drums trumpet harp banjo clarinet oboe accordion".split()
LANGUAGES = "French German Spanish Italian Polish Greek Turkish Hindi Korean Swahili Dutch Finnish Latin".split()
PLACES = (
    "the kitchen drawer|the blue box|the garage|the top shelf|my coat pocket|the cellar|the green bag|"
    "the attic|the red cupboard|the desk|the car|the garden shed|the old suitcase|the fridge|the hall|"
    "the piano|the bottom drawer|the flower pot|the bookcase|the bathroom"
).split("|")
CODE_WORDS = (
    "zebra falcon copper maple thunder velvet anchor lantern pebble saffron cobalt meadow walnut ember "
    "glacier orchid pepper raven sapphire tulip umbrella willow bamboo cactus dragon harbor island jungle "
    "pineapple marble nectar octopus penguin rocket sunflower tornado volcano window compass kedge"
).split()
NOUNS = (
    "apple book chair door engine flower garden hammer island jacket kettle ladder mirror needle oven pencil "
    "river spoon table uncle valley wagon basket candle bridge cloud drum egg feather glove hat ink jar key "
    "lamp moon nest ocean paper quilt rope shell tower vase wheel box yarn stone tree"
).split()
COUNTRIES = (
    "France Spain Italy Germany Japan Egypt Peru Norway Kenya Canada Brazil India China Greece Poland Cuba "
    "Chile Ghana Nepal Iceland Portugal Sweden Turkey Ireland"
).split()

ONSETS = "b d f g h j k l m n p r s t v w z br dr gr kr tr st sh ch pl fl".split()
VOWELS = "a e i o u a e i o ai ee ou".split()
CODAS = ["", "", "", "n", "r", "l", "s", "k", "m", "x", "th"]
HELD_OUT_SHARE = 8

Sampler = Callable[[random.Random, bool], str]


def is_held_out(word: str) -> bool:
    """Whether a made-up word belongs to evaluation only. Case does not matter."""
    return zlib.crc32(word.lower().encode()) % HELD_OUT_SHARE == 0


def made_up_word(rng: random.Random, held_out: bool) -> str:
    """A lower-case word of two or three syllables from the wanted side of the split."""
    while True:
        count = 2 if rng.random() < 0.7 else 3
        syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(count)]
        word = "".join(syllables) + rng.choice(CODAS)
        if is_held_out(word) == held_out:
            return word


def made_up_name(rng: random.Random, held_out: bool) -> str:
    return made_up_word(rng, held_out).capitalize()


def mixed(words: list[str], made_up: Callable[[random.Random, bool], str] | None = None, share: float = 0.5) -> Sampler:
    """Sampler that draws from ``words`` or, with probability ``share``, makes a word up."""

    def sample(rng: random.Random, held_out: bool) -> str:
        if made_up is not None and rng.random() < share:
            return made_up(rng, held_out)
        return rng.choice(words)

    return sample


def digits(low: int, high: int) -> Sampler:
    """Sampler of a number with ``low`` to ``high`` digits."""

    def sample(rng: random.Random, held_out: bool) -> str:
        count = rng.randint(low, high)
        return str(rng.randint(1, 9)) + "".join(str(rng.randint(0, 9)) for _ in range(count - 1))

    return sample


def code(rng: random.Random, held_out: bool) -> str:
    """A code word of many shapes: zebra, KAVOR, blue-otter, zebra42, K7-QM3, 4821."""
    shape = rng.random()
    if shape < 0.3:
        return rng.choice(CODE_WORDS)
    word = made_up_word(rng, held_out)
    if shape < 0.55:
        return word
    if shape < 0.65:
        return rng.choice([word.capitalize(), word.upper(), rng.choice(CODE_WORDS).upper()])
    if shape < 0.77:
        return f"{rng.choice(COLOURS + CODE_WORDS)}-{rng.choice(ANIMALS + NOUNS + [word])}"
    if shape < 0.87:
        base = rng.choice([rng.choice(CODE_WORDS), word, word.upper()])
        return f"{base}{rng.choice(['', '-'])}{rng.randint(0, 999)}"
    if shape < 0.95:
        return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789-") for _ in range(rng.randint(3, 5))) + str(
            rng.randint(0, 99)
        )
    return digits(3, 6)(rng, held_out)


def clock_time(rng: random.Random, held_out: bool) -> str:
    return f"{rng.randint(1, 23)}:{rng.choice(['00', '15', '30', '45', '10', '20', '05'])}"


def date(rng: random.Random, held_out: bool) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"


def two_names(rng: random.Random, held_out: bool) -> str:
    """A first name, sometimes with a surname."""
    first = mixed(FIRST_NAMES, made_up_name)(rng, held_out)
    if rng.random() < 0.2:
        return f"{first} {made_up_name(rng, held_out)}"
    return first


def job(rng: random.Random, held_out: bool) -> str:
    return f"a {made_up_word(rng, held_out)}" if rng.random() < 0.25 else rng.choice(JOBS)


def place(rng: random.Random, held_out: bool) -> str:
    return f"the {made_up_word(rng, held_out)} box" if rng.random() < 0.25 else rng.choice(PLACES)
