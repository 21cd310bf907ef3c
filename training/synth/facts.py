"""A small set of world facts and questions about them."""

from __future__ import annotations

import random

from training.synth import pick

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Portugal:Lisbon|Ireland:Dublin|Austria:Vienna|Poland:Warsaw|"
        "Norway:Oslo|Sweden:Stockholm|Finland:Helsinki|Denmark:Copenhagen|Greece:Athens|Hungary:Budapest|Egypt:Cairo|"
        "Kenya:Nairobi|Ghana:Accra|Nigeria:Abuja|Morocco:Rabat|Ethiopia:Addis Ababa|Japan:Tokyo|China:Beijing|India:New Delhi|"
        "South Korea:Seoul|Thailand:Bangkok|Vietnam:Hanoi|Indonesia:Jakarta|Malaysia:Kuala Lumpur|Australia:Canberra|"
        "New Zealand:Wellington|Canada:Ottawa|Mexico:Mexico City|Brazil:Brasília|Argentina:Buenos Aires|Chile:Santiago|"
        "Peru:Lima|Colombia:Bogotá|Cuba:Havana|Turkey:Ankara|Iran:Tehran|Iraq:Baghdad|Israel:Jerusalem|Russia:Moscow|"
        "Ukraine:Kyiv|Romania:Bucharest|Bulgaria:Sofia|Serbia:Belgrade|Croatia:Zagreb|Belgium:Brussels|Switzerland:Bern|"
        "the Netherlands:Amsterdam|the United Kingdom:London|the United States:Washington, D.C.|the Philippines:Manila|"
        "Iceland:Reykjavik|Estonia:Tallinn|Latvia:Riga|Lithuania:Vilnius|the Czech Republic:Prague|Saudi Arabia:Riyadh|"
        "Pakistan:Islamabad|Nepal:Kathmandu|Venezuela:Caracas|Ecuador:Quito|Uruguay:Montevideo|Bolivia:Sucre|Senegal:Dakar"
    ).split("|")
)
LANGUAGES = dict(
    pair.split(":")
    for pair in (
        "France:French|Germany:German|Italy:Italian|Spain:Spanish|Portugal:Portuguese|Japan:Japanese|Brazil:Portuguese|"
        "Mexico:Spanish|Russia:Russian|Greece:Greek|Poland:Polish|Sweden:Swedish|Norway:Norwegian|Turkey:Turkish|"
        "Iran:Persian|Egypt:Arabic|China:Mandarin Chinese|South Korea:Korean|Argentina:Spanish|Austria:German"
    ).split("|")
)
OPPOSITES = [
    pair.split(":")
    for pair in (
        "hot:cold|big:small|fast:slow|light:dark|up:down|open:closed|early:late|happy:sad|full:empty|high:low|old:new|"
        "strong:weak|wet:dry|hard:soft|rich:poor|loud:quiet|thick:thin|sharp:blunt|true:false|first:last|left:right|"
        "near:far|clean:dirty|heavy:light|wide:narrow|deep:shallow|brave:cowardly|win:lose|buy:sell|push:pull"
    ).split("|")
]
PLURALS = [
    pair.split(":")
    for pair in "mouse:mice|child:children|foot:feet|tooth:teeth|leaf:leaves|knife:knives|city:cities|box:boxes|man:men|"
    "woman:women|goose:geese|sheep:sheep|wolf:wolves|baby:babies|person:people|half:halves|potato:potatoes".split("|")
]
PAST = [
    pair.split(":")
    for pair in "go:went|see:saw|take:took|write:wrote|eat:ate|run:ran|give:gave|come:came|find:found|speak:spoke|"
    "buy:bought|think:thought|begin:began|swim:swam|drive:drove|break:broke|fly:flew|know:knew|sing:sang|teach:taught".split(
        "|"
    )
]
SYMBOLS = [
    pair.split(":")
    for pair in "hydrogen:H|helium:He|carbon:C|nitrogen:N|oxygen:O|sodium:Na|iron:Fe|copper:Cu|silver:Ag|gold:Au|"
    "potassium:K|calcium:Ca|lead:Pb|tin:Sn|zinc:Zn|mercury:Hg|sulfur:S|chlorine:Cl|neon:Ne|magnesium:Mg".split("|")
]
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth".split()
SINGLE = [  # question variants, answer
    (["What is the largest planet in the solar system?", "Which planet is the largest?", "Name the biggest planet."], "Jupiter is the largest planet in the solar system."),
    (["What is the largest ocean on Earth?", "Which ocean is the largest?", "Name the biggest ocean."], "The Pacific Ocean is the largest ocean on Earth."),
    (["What is the highest mountain on Earth?", "Which mountain is the tallest?", "Name the highest mountain."], "Mount Everest is the highest mountain on Earth."),
    (["How many days are in a week?", "How many days does a week have?", "Count the days of a week."], "A week has seven days."),
    (["How many months are in a year?", "How many months does a year have?", "Count the months of a year."], "A year has twelve months."),
    (["How many legs does a spider have?", "What number of legs has a spider?", "Count the legs of a spider."], "A spider has eight legs."),
    (["What is water made of?", "What does water consist of?", "Name the elements in water."], "Water is made of hydrogen and oxygen."),
    (["At what temperature does water boil?", "What is the boiling point of water?", "When does water boil?"], "Water boils at 100 degrees Celsius at sea level."),
    (["At what temperature does water freeze?", "What is the freezing point of water?", "When does water freeze?"], "Water freezes at 0 degrees Celsius."),
    (["Who wrote Romeo and Juliet?", "Who is the author of Romeo and Juliet?", "Name the author of Hamlet."], "William Shakespeare wrote it."),
    (["Who wrote Pride and Prejudice?", "Who is the author of Pride and Prejudice?", "Which author wrote Pride and Prejudice?"], "Jane Austen wrote Pride and Prejudice."),
    (["Who wrote Moby-Dick?", "Who is the author of Moby-Dick?", "Which author wrote Moby-Dick?"], "Herman Melville wrote Moby-Dick."),
    (["How many minutes are in an hour?", "How many minutes does an hour have?", "Count the minutes of an hour."], "An hour has 60 minutes."),
    (["How many hours are in a day?", "How many hours does a day have?", "Count the hours of a day."], "A day has 24 hours."),
    (["What color is the sky on a clear day?", "Which color does a clear sky have?", "Say the color of the sky."], "On a clear day the sky is blue."),
    (["What do bees make?", "What do bees produce?", "Name a product of bees."], "Bees make honey."),
    (["What is the closest star to Earth?", "Which star is nearest to us?", "Name the nearest star."], "The Sun is the closest star to Earth."),
    (["What gas do plants absorb?", "Which gas do plants take in?", "Name the gas that plants absorb."], "Plants absorb carbon dioxide and release oxygen."),
    (["What is Python?", "What kind of thing is Python?", "Explain what Python is."], "Python is a programming language that is known for its readable syntax."),
    (["How many continents are there?", "What is the number of continents?", "Count the continents."], "There are seven continents."),
    (["What is the speed of light?", "How fast is light?", "Say the speed of light."], "Light travels at about 300,000 kilometers per second in a vacuum."),
    (["Who was the first president of the United States?", "Who was the first US president?", "Name the first US president."], "George Washington was the first president of the United States."),
    (["Hello!", "Hi!", "Hi there!", "Good morning!", "Hey!", "Hello", "Good evening!", "Hi"], "Hello! How can I help you?"),
    (["How are you?", "How are you doing?", "How do you do?"], "I am fine, thank you. How can I help you?"),
    (["Who are you?", "What are you?", "What is your name?", "Introduce yourself."], "I am nano, a very small language model. I can answer short questions, find facts in a text and call tools."),
    (["What can you do?", "How can you help me?", "What are you good at?"], "I can continue text, write simple Python, find facts in a long text, do small sums and call tools."),
    (["Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much."], "You are welcome!"),
    (["Goodbye!", "Bye!", "See you later!", "Good night!"], "Goodbye!"),
]  # fmt: skip


def ask_fact(rng: random.Random, split: str) -> tuple[str, str, str]:
    """(question, reasoning, answer)."""
    kind = rng.randrange(9)
    if kind <= 2:
        country, city = rng.choice(list(CAPITALS.items()))
        if kind < 2:
            wordings = [
                "What is the capital of {}?", "What's the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?",
                "Tell me the capital of {}.", "capital of {}?", "Do you know the capital of {}?", "I forgot the capital of {}. What is it?",
            ]  # fmt: skip
            return (
                pick(rng, wordings, split).format(country),
                f"The capital of {country} is {city}.",
                f"The capital of {country} is {city}.",
            )
        wordings = [
            "{} is the capital of which country?",
            "Which country has {} as its capital?",
            "Of which country is {} the capital?",
        ]
        answer = f"{city} is the capital of {country}."
        return pick(rng, wordings, split).format(city), answer, answer
    if kind == 3:
        country, language = rng.choice(list(LANGUAGES.items()))
        wordings = [
            "What language is spoken in {}?",
            "Which language do people speak in {}?",
            "Name the main language of {}.",
            "What do people in {} speak?",
        ]
        answer = f"People in {country} speak {language}."
        return pick(rng, wordings, split).format(country), answer, answer
    if kind == 4:
        a, b = rng.choice(OPPOSITES)
        if rng.random() < 0.5:
            a, b = b, a
        wordings = [
            'What is the opposite of "{}"?',
            "Give me the opposite of {}.",
            "What is the antonym of {}?",
            "Which word is the opposite of {}?",
        ]
        return pick(rng, wordings, split).format(a), f"The opposite of {a} is {b}.", f'The opposite of "{a}" is "{b}".'
    if kind == 5:
        a, b = rng.choice(PLURALS)
        wordings = [
            'What is the plural of "{}"?',
            "Give the plural of {}.",
            "How do you form the plural of {}?",
            "Plural of {}?",
        ]
        return pick(rng, wordings, split).format(a), f"The plural of {a} is {b}.", f'The plural of "{a}" is "{b}".'
    if kind == 6:
        a, b = rng.choice(PAST)
        wordings = [
            'What is the past tense of "{}"?',
            "Give the past tense of {}.",
            "What is the simple past of {}?",
            "Past tense of {}?",
        ]
        return (
            pick(rng, wordings, split).format(a),
            f"The past tense of {a} is {b}.",
            f'The past tense of "{a}" is "{b}".',
        )
    if kind == 7:
        if rng.random() < 0.5:
            a, b = rng.choice(SYMBOLS)
            wordings = [
                "What is the chemical symbol for {}?",
                "Which symbol does {} have?",
                "Give the symbol of the element {}.",
                "Symbol of {}?",
            ]
            return (
                pick(rng, wordings, split).format(a),
                f"The symbol of {a} is {b}.",
                f"The chemical symbol for {a} is {b}.",
            )
        n = rng.randrange(8)
        wordings = [
            "What is the {} planet from the Sun?",
            "Which planet is {} from the Sun?",
            "Name the {} planet.",
            "The {} planet is called what?",
        ]
        return (
            pick(rng, wordings, split).format(ORDINALS[n]),
            "The order is " + ", ".join(PLANETS) + ".",
            f"The {ORDINALS[n]} planet from the Sun is {PLANETS[n]}.",
        )
    questions, answer = rng.choice(SINGLE)
    return pick(rng, questions, split), answer, answer
