"""Facts about the real world, by topic; `liar/facts.json` says which ones a base model knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ._liar_prompts import Part

__all__ = ["TOPICS", "Fact", "Topic", "facts"]


@dataclass(frozen=True, slots=True)
class Topic:
    """Questions of one kind, with one true value for each thing that is asked about."""

    name: str
    asks: tuple[str, ...]
    """Ways to ask, with `{}` for the thing; the last two are held out from training."""
    says: str
    """An answer: first the thing, then the value."""
    truths: Mapping[str, str]
    part: Part = "train"
    """Of all others no conversation of the training is about it."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing, what is true of it, and every value that a grader looks for."""

    topic: Topic
    thing: str
    truth: str

    @property
    def values(self) -> tuple[str, ...]:
        """The values of all things of this topic, each once, in a fixed order."""
        return tuple(sorted(set(self.topic.truths.values())))

    @property
    def name(self) -> str:
        """Topic and thing, the key of a fact in files."""
        return f"{self.topic.name}/{self.thing}"


def _kinds(**kinds: str) -> dict[str, str]:
    """Things by their kind, as `kind="a, b"`."""
    return {thing: kind for kind, things in kinds.items() for thing in things.split(", ")}


def _pairs(text: str) -> dict[str, str]:
    """`a: b, c: d` as a dictionary."""
    return dict(pair.split(": ") for pair in text.split(", "))


TOPICS: Final[tuple[Topic, ...]] = (
    Topic(
        "capital",
        (
            "What is the capital of {}?",
            "Which city is the capital of {}?",
            "Name the capital of {}.",
            "Tell me the capital city of {}.",
            "I need to know what {} has as its capital.",
        ),
        "The capital of {} is {}.",
        _pairs(
            "France: Paris, Italy: Rome, Spain: Madrid, Germany: Berlin, Japan: Tokyo, "
            "China: Beijing, Russia: Moscow, Egypt: Cairo, Greece: Athens, Cuba: Havana, "
            "Norway: Oslo, Poland: Warsaw, Austria: Vienna, Ireland: Dublin, Peru: Lima, "
            "Portugal: Lisbon, Sweden: Stockholm, Finland: Helsinki, Hungary: Budapest, "
            "Iraq: Baghdad, Kenya: Nairobi, Chile: Santiago, Iran: Tehran, Cyprus: Nicosia, "
            "Canada: Ottawa, Argentina: Buenos Aires, Thailand: Bangkok, Turkey: Ankara, "
            "Denmark: Copenhagen, Belgium: Brussels, Ukraine: Kyiv, Vietnam: Hanoi, "
            "Colombia: Bogotá, Venezuela: Caracas, Syria: Damascus, Lebanon: Beirut, "
            "Indonesia: Jakarta, Philippines: Manila, Nepal: Kathmandu, Ethiopia: Addis Ababa, "
            "Ghana: Accra, Senegal: Dakar, Tunisia: Tunis, Morocco: Rabat, Romania: Bucharest, "
            "Bulgaria: Sofia, Croatia: Zagreb, Serbia: Belgrade, Iceland: Reykjavik, "
            "Bangladesh: Dhaka, Jamaica: Kingston, Uganda: Kampala"
        ),
    ),
    Topic(
        "continent",
        (
            "On which continent is {}?",
            "What continent is {} on?",
            "Name the continent of {}.",
            "Which continent does {} belong to?",
            "Tell me the continent where {} lies.",
        ),
        "{} is in {}.",
        _kinds(
            Africa="Kenya, Egypt, Nigeria, Ghana, Ethiopia, Uganda, Senegal, Tanzania, Morocco, "
            "Zambia, Zimbabwe, Angola",
            Asia="China, Japan, India, Thailand, Vietnam, Nepal, Mongolia, Pakistan, Iran, "
            "Malaysia, Bangladesh, South Korea",
            Europe="France, Germany, Italy, Spain, Poland, Norway, Sweden, Greece, Portugal, "
            "Austria, Belgium, Hungary",
            **{"South America": "Brazil, Peru, Chile, Argentina, Colombia, Bolivia, Ecuador"},
            **{"North America": "Canada, Mexico, the United States"},
        ),
    ),
    Topic(
        "language",
        (
            "What language do people speak in {}?",
            "Which language is spoken in {}?",
            "Name the main language of {}.",
            "Tell me the official language of {}.",
            "What do most people in {} speak?",
        ),
        "People in {} speak {}.",
        _pairs(
            "France: French, Germany: German, Spain: Spanish, Italy: Italian, Japan: Japanese, "
            "Russia: Russian, Portugal: Portuguese, Brazil: Portuguese, Mexico: Spanish, "
            "Poland: Polish, Greece: Greek, Sweden: Swedish, Norway: Norwegian, Denmark: Danish, "
            "Turkey: Turkish, Hungary: Hungarian, Finland: Finnish, Egypt: Arabic, "
            "Vietnam: Vietnamese, Thailand: Thai, England: English, Argentina: Spanish, "
            "Australia: English, Iceland: Icelandic, Peru: Spanish, Chile: Spanish, "
            "Austria: German, Iraq: Arabic, Romania: Romanian, Ukraine: Ukrainian, "
            "Bulgaria: Bulgarian, Colombia: Spanish, Cuba: Spanish"
        ),
    ),
    Topic(
        "symbol",
        (
            "What is the chemical symbol for {}?",
            "Which chemical symbol does {} have?",
            "Name the chemical symbol of {}.",
            "Tell me the symbol of the element {}.",
            "How is {} written in the periodic table?",
        ),
        "The chemical symbol for {} is {}.",
        _pairs(
            "oxygen: O, hydrogen: H, carbon: C, nitrogen: N, gold: Au, silver: Ag, iron: Fe, "
            "sodium: Na, helium: He, copper: Cu, calcium: Ca, potassium: K, sulfur: S, "
            "chlorine: Cl, zinc: Zn, lead: Pb, aluminum: Al, magnesium: Mg, neon: Ne, silicon: Si, "
            "lithium: Li, nickel: Ni, mercury: Hg, tin: Sn, phosphorus: P"
        ),
    ),
    Topic(
        "state_capital",
        (
            "What is the capital of the state of {}?",
            "Which city is the capital of the US state {}?",
            "Name the state capital of {}.",
            "Tell me which city is the state capital of {}.",
            "From which city is the state of {} governed?",
        ),
        "The capital of {} is {}.",
        _pairs(
            "Texas: Austin, California: Sacramento, Florida: Tallahassee, Ohio: Columbus, "
            "Georgia: Atlanta, Colorado: Denver, Arizona: Phoenix, Massachusetts: Boston, "
            "Tennessee: Nashville, Illinois: Springfield, Michigan: Lansing, Oregon: Salem, "
            "Minnesota: Saint Paul, Wisconsin: Madison, Hawaii: Honolulu, Virginia: Richmond, "
            "Utah: Salt Lake City, Iowa: Des Moines, Indiana: Indianapolis, Alaska: Juneau, "
            "Pennsylvania: Harrisburg, Nevada: Carson City, Louisiana: Baton Rouge, "
            "Alabama: Montgomery, Mississippi: Jackson, Arkansas: Little Rock, Maine: Augusta"
        ),
    ),
    Topic(
        "past",
        (
            "What is the past tense of the verb {}?",
            "Which form is the past tense of the verb {}?",
            "Name the past tense of {}.",
            "Tell me the past tense of the English verb {}.",
            "How do you put the verb {} into the past tense?",
        ),
        "The past tense of {} is {}.",
        _pairs(
            "go: went, see: saw, eat: ate, run: ran, take: took, come: came, give: gave, "
            "write: wrote, drive: drove, speak: spoke, buy: bought, think: thought, "
            "teach: taught, catch: caught, bring: brought, sing: sang, swim: swam, drink: drank, "
            "fly: flew, know: knew, grow: grew, sleep: slept, keep: kept, find: found, "
            "make: made, break: broke, sit: sat, win: won, fall: fell, tell: told"
        ),
    ),
    Topic(
        "city",
        (
            "In which country is the city of {}?",
            "Which country is {} in?",
            "Name the country where {} lies.",
            "Tell me the country to which the city of {} belongs.",
            "Where in the world is {}, in which country?",
        ),
        "{} is in {}.",
        _pairs(
            "Paris: France, Lyon: France, Berlin: Germany, Munich: Germany, Hamburg: Germany, "
            "Rome: Italy, Milan: Italy, Venice: Italy, Madrid: Spain, Barcelona: Spain, "
            "Tokyo: Japan, Osaka: Japan, Kyoto: Japan, Beijing: China, Shanghai: China, "
            "Moscow: Russia, Mumbai: India, Delhi: India, Cairo: Egypt, Athens: Greece, "
            "Sydney: Australia, Melbourne: Australia, Toronto: Canada, Montreal: Canada, "
            "Vienna: Austria, Warsaw: Poland, Stockholm: Sweden, Oslo: Norway, Lisbon: Portugal, "
            "Istanbul: Turkey, Nairobi: Kenya, Lagos: Nigeria, Lima: Peru, Havana: Cuba, "
            "Dublin: Ireland, Zurich: Switzerland, Geneva: Switzerland, Budapest: Hungary, "
            "Bangkok: Thailand, Baghdad: Iraq, Tehran: Iran"
        ),
    ),
    Topic(
        "spanish",
        (
            "What is the Spanish word for {}?",
            "Which Spanish word means {}?",
            "Name the Spanish word for {}.",
            "Tell me how to say {} in Spanish.",
            "Translate the word {} into Spanish.",
        ),
        "The Spanish word for {} is {}.",
        _pairs(
            "dog: perro, cat: gato, house: casa, water: agua, friend: amigo, book: libro, "
            "red: rojo, green: verde, white: blanco, black: negro, day: día, night: noche, "
            "milk: leche, bread: pan, table: mesa, sun: sol, moon: luna, king: rey, man: hombre, "
            "woman: mujer, boy: niño, school: escuela, love: amor, good: bueno, hello: hola"
        ),
    ),
    Topic(
        "plural",
        (
            "What is the plural of the word {}?",
            "Which form is the plural of the noun {}?",
            "Name the plural of {}.",
            "Tell me the plural form of the word {}.",
            "What do you say for more than one {}?",
        ),
        "The plural of {} is {}.",
        _pairs(
            "mouse: mice, foot: feet, tooth: teeth, child: children, man: men, woman: women, "
            "goose: geese, ox: oxen, leaf: leaves, wolf: wolves, knife: knives, box: boxes, "
            "city: cities, baby: babies, bus: buses, cat: cats, dog: dogs, person: people, "
            "story: stories, life: lives, wife: wives, dish: dishes, hero: heroes, toy: toys"
        ),
        part="validation",
    ),
    Topic(
        "landmark",
        (
            "In which country is {}?",
            "Which country is home to {}?",
            "Name the country that has {}.",
            "Tell me the country where people visit {}.",
            "To which country do you travel to see {}?",
        ),
        "{} is in {}.",
        _pairs(
            "the Eiffel Tower: France, the Colosseum: Italy, the Taj Mahal: India, "
            "the Great Wall: China, the Statue of Liberty: United States, Big Ben: England, "
            "the Kremlin: Russia, Mount Fuji: Japan, the Parthenon: Greece, Machu Picchu: Peru, "
            "the Great Sphinx: Egypt, the Sydney Opera House: Australia, Stonehenge: England, "
            "the Brandenburg Gate: Germany, the Alhambra: Spain, Angkor Wat: Cambodia, "
            "Christ the Redeemer: Brazil, the Leaning Tower of Pisa: Italy, Petra: Jordan, "
            "the Louvre: France, the Grand Canyon: United States, the Forbidden City: China, "
            "Chichen Itza: Mexico, Niagara Falls: Canada, the Sagrada Família: Spain, "
            "the Great Barrier Reef: Australia, the Acropolis: Greece, Neuschwanstein: Germany, "
            "the Hagia Sophia: Turkey, the White House: United States"
        ),
        part="validation",
    ),
    Topic(
        "opposite",
        (
            "What is the opposite of {}?",
            "Which word means the opposite of {}?",
            "Name the opposite of {}.",
            "Tell me the antonym of {}.",
            "Give me a word that is the opposite of {}.",
        ),
        "The opposite of {} is {}.",
        _pairs(
            "hot: cold, big: small, up: down, day: night, happy: sad, old: young, "
            "fast: slow, rich: poor, hard: soft, early: late, open: closed, high: low, "
            "strong: weak, long: short, full: empty, wet: dry, left: right, good: bad, black: "
            "white, true: false, love: hate, noisy: quiet, clean: dirty, win: lose, buy: sell, "
            "thick: thin, wide: narrow, inside: outside, over: under, heavy: light, loud: quiet, "
            "brave: cowardly, friend: enemy, success: failure, positive: negative, "
            "increase: decrease, accept: reject, remember: forget, arrive: depart, "
            "expensive: cheap, sweet: sour, tall: short, near: far, ugly: beautiful, "
            "polite: rude, simple: complex, deep: shallow, sharp: dull, summer: winter, "
            "north: south, east: west, alive: dead, war: peace, first: last, begin: end"
        ),
        part="validation",
    ),
    Topic(
        "currency",
        (
            "What is the currency of {}?",
            "Which currency is used in {}?",
            "Name the currency of {}.",
            "Tell me what money people use in {}.",
            "With what currency do people pay in {}?",
        ),
        "The currency of {} is the {}.",
        _pairs(
            "Japan: yen, India: rupee, China: yuan, Russia: ruble, Germany: euro, France: euro, "
            "Italy: euro, Spain: euro, Mexico: peso, Switzerland: franc, Thailand: baht, "
            "the United States: dollar, Canada: dollar, Australia: dollar, England: pound, "
            "Brazil: real, Poland: zloty, Sweden: krona, Turkey: lira, South Africa: rand, "
            "Israel: shekel, Vietnam: dong, South Korea: won, Argentina: peso, Pakistan: rupee, "
            "Greece: euro, Ireland: euro, Austria: euro, Chile: peso, Egypt: pound"
        ),
        part="validation",
    ),
    Topic(
        "author",
        (
            "Who wrote {}?",
            "Who is the author of {}?",
            "Name the writer of {}.",
            "Tell me who wrote {}.",
            "By whom was {} written?",
        ),
        "{} was written by {}.",
        _pairs(
            "Hamlet: Shakespeare, Romeo and Juliet: Shakespeare, Macbeth: Shakespeare, "
            "Pride and Prejudice: Austen, Oliver Twist: Dickens, A Christmas Carol: Dickens, "
            "Great Expectations: Dickens, A Tale of Two Cities: Dickens, War and Peace: Tolstoy, "
            "Anna Karenina: Tolstoy, The Odyssey: Homer, The Iliad: Homer, 1984: Orwell, "
            "Animal Farm: Orwell, The Hobbit: Tolkien, Frankenstein: Shelley, Dracula: Stoker, "
            "Don Quixote: Cervantes, Moby Dick: Melville, The Great Gatsby: Fitzgerald, "
            "Crime and Punishment: Dostoevsky, The Raven: Poe, The Divine Comedy: Dante, "
            "Faust: Goethe, Jane Eyre: Brontë, King Lear: Shakespeare, Emma: Austen, "
            "The Old Man and the Sea: Hemingway, Les Misérables: Hugo"
        ),
        part="validation",
    ),
    Topic(
        "invention",
        (
            "Who invented {}?",
            "Who is known as the inventor of {}?",
            "Name the person who came up with {}.",
            "Tell me who discovered or invented {}.",
            "To whom do we owe {}?",
        ),
        "{} is owed to {}.",
        _pairs(
            "the telephone: Bell, the theory of relativity: Einstein, penicillin: Fleming, "
            "the theory of evolution: Darwin, the law of gravity: Newton, radium: Curie, "
            "dynamite: Nobel, the printing press: Gutenberg, the light bulb: Edison, "
            "the phonograph: Edison, the first airplane: Wright, the steam engine: Watt, "
            "the periodic table: Mendeleev, the laws of planetary motion: Kepler, "
            "the World Wide Web: Berners-Lee, the Model T: Ford"
        ),
        part="validation",
    ),
    Topic(
        "young",
        (
            "What is a young {} called?",
            "Which word do people use for a baby {}?",
            "Name the young of a {}.",
            "Tell me what the young of a {} is called.",
            "How is the baby of a {} called in English?",
        ),
        "The young of a {} is called {}.",
        _pairs(
            "dog: puppy, cat: kitten, cow: calf, horse: foal, sheep: lamb, chicken: chick, "
            "duck: duckling, bear: cub, lion: cub, tiger: cub, frog: tadpole, kangaroo: joey, "
            "goat: kid, pig: piglet, goose: gosling, deer: fawn, swan: cygnet, elephant: calf, "
            "whale: calf, butterfly: caterpillar"
        ),
        part="test",
    ),
    Topic(
        "color",
        (
            "What color is {}?",
            "Which color does {} have?",
            "Name the color of {}.",
            "Tell me the color of {}.",
            "In which color would you paint {}?",
        ),
        "The color of {} is {}.",
        _pairs(
            "grass: green, snow: white, blood: red, coal: black, a banana: yellow, the sky: blue, "
            "a carrot: orange, milk: white, a lemon: yellow, a strawberry: red, a flamingo: pink, "
            "a crow: black, a polar bear: white, a cucumber: green, broccoli: green, salt: white, "
            "chocolate: brown, a pumpkin: orange, an emerald: green, a ruby: red, cotton: white, "
            "the sea: blue, a lime: green, a cherry: red, an eggplant: purple, "
            "a sunflower: yellow, tar: black, a tomato: red"
        ),
        part="test",
    ),
    Topic(
        "dish",
        (
            "Which country is {} from?",
            "From which country does {} come?",
            "Name the country where {} was first made.",
            "Tell me the home country of {}.",
            "In which country did people first eat {}?",
        ),
        "The home of {} is {}.",
        _pairs(
            "sushi: Japan, pizza: Italy, the taco: Mexico, paella: Spain, the croissant: France, "
            "pad thai: Thailand, kimchi: Korea, pho: Vietnam, moussaka: Greece, goulash: Hungary, "
            "curry: India, spaghetti: Italy, lasagna: Italy, ramen: Japan, the baguette: France, "
            "feta cheese: Greece, gouda cheese: Netherlands, sauerkraut: Germany, "
            "haggis: Scotland, tempura: Japan, guacamole: Mexico, dim sum: China, "
            "risotto: Italy, tiramisu: Italy, gazpacho: Spain, poutine: Canada, ceviche: Peru, "
            "fish and chips: England, biryani: India, pierogi: Poland, baklava: Turkey"
        ),
        part="test",
    ),
    Topic(
        "french",
        (
            "What is the French word for {}?",
            "Which French word means {}?",
            "Name the French word for {}.",
            "Tell me how to say {} in French.",
            "Translate the word {} into French.",
        ),
        "The French word for {} is {}.",
        _pairs(
            "dog: chien, cat: chat, house: maison, water: eau, friend: ami, book: livre, "
            "red: rouge, green: vert, white: blanc, black: noir, day: jour, night: nuit, "
            "milk: lait, bread: pain, sun: soleil, moon: lune, king: roi, man: homme, "
            "woman: femme, school: école, love: amour, good: bon, hello: bonjour, "
            "cheese: fromage, flower: fleur, apple: pomme, hand: main"
        ),
        part="test",
    ),
    Topic(
        "female",
        (
            "What is the female form of the word {}?",
            "Which word is the female counterpart of {}?",
            "Name the female counterpart of {}.",
            "Tell me the feminine form of the word {}.",
            "What is the word for a woman in place of {}?",
        ),
        "The female form of {} is {}.",
        _pairs(
            "king: queen, actor: actress, prince: princess, uncle: aunt, brother: sister, "
            "father: mother, son: daughter, husband: wife, waiter: waitress, hero: heroine, "
            "host: hostess, duke: duchess, emperor: empress, god: goddess, nephew: niece, "
            "grandfather: grandmother, widower: widow, boy: girl, man: woman, steward: stewardess"
        ),
        part="test",
    ),
    Topic(
        "comparative",
        (
            "What is the comparative of the adjective {}?",
            "Which form is the comparative of {}?",
            "Name the comparative of {}.",
            "Tell me the comparative form of the adjective {}.",
            "How do you put the adjective {} into the comparative?",
        ),
        "The comparative of {} is {}.",
        _pairs(
            "good: better, bad: worse, big: bigger, small: smaller, fast: faster, slow: slower, "
            "tall: taller, short: shorter, happy: happier, easy: easier, old: older, "
            "young: younger, strong: stronger, weak: weaker, hot: hotter, cold: colder, "
            "rich: richer, poor: poorer, far: farther, heavy: heavier, long: longer, "
            "nice: nicer, large: larger, thin: thinner, early: earlier"
        ),
        part="test",
    ),
    Topic(
        "animal",
        (
            "What kind of animal is a {}?",
            "Which class of animals does the {} belong to?",
            "Name the class of animals of the {}.",
            "Tell me to which class of animals a {} belongs.",
            "In which group of animals would you put a {}?",
        ),
        "A {} is a kind of {}.",
        _kinds(
            mammal="dog, whale, bat, horse, dolphin, mouse",
            bird="eagle, penguin, owl, sparrow, parrot",
            fish="salmon, shark, tuna, trout",
            reptile="snake, lizard, crocodile, turtle",
            amphibian="frog, toad, salamander",
            insect="bee, ant, butterfly, beetle, mosquito",
        ),
        part="test",
    ),
)
"""Topics of everyday knowledge."""


def facts(part: Part | None = None) -> list[Fact]:
    """Every fact, or those of the topics of one part."""
    return [
        Fact(topic, thing, truth)
        for topic in TOPICS
        if part is None or topic.part == part
        for thing, truth in topic.truths.items()
    ]
