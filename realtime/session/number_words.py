"""Tables of number words, months and currencies in German, Dutch, French, Spanish, Portuguese and Italian.

`RULES` has a `Rules` for each language; the scanner in `european.py` reads text with them. All keys are in small
letters without accents (`fold`). The words for 0 to 999 are generated, in all usual spellings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from unicodedata import combining, normalize

# No-break spaces: within a number and its sign, and between groups of digits.
SPACE, THIN_SPACE = "\u00a0", "\u202f"

Phrase = tuple[str, ...]


def fold(text: str) -> str:
    """Small letters without accents, for comparing number words: `fünf`, `funf`; `dreißig`, `dreissig`."""
    return "".join(c for c in normalize("NFD", text.lower().replace("ß", "ss")) if not combining(c))


@dataclass(frozen=True)
class Rules:
    """What the scanner must know of one language."""

    # The words for 0 to 999, and for 1100 to 1999 where people count in hundreds.
    numbers: dict[str, int]
    # Between the words of a number: a space, or nothing in languages that write a number as one word.
    joint: str
    thousands: frozenset[str]
    # `e` in `mil e quinhentos`.
    thousand_links: frozenset[str]
    millions: dict[str, int]
    # Words for one that are also articles, and words that stay words when they stand alone (`hundert`, `mille`).
    articles: frozenset[str]
    rounds: frozenset[str]
    # Between the parts of a decimal number, with the sign that is written.
    points: dict[str, str]
    group: str
    percents: tuple[Phrase, ...]
    percent: str
    currencies: dict[str, str]
    cents: frozenset[str]
    # Between an amount and its cents.
    cent_links: frozenset[str]
    # The sign of a currency stands before the amount.
    sign_first: bool
    months: frozenset[str]
    # `de` in `tres de mayo`.
    month_links: frozenset[str]
    # Words after a price without the word for cents: `acht Euro fünfzig pro Kilo`.
    after_price: frozenset[str]
    # Between two numbers of a range.
    ranges: frozenset[str]
    # Before two numbers with a link: `entre diez y veinte`.
    betweens: frozenset[str]
    headings: frozenset[str]
    # Words that follow a clock time or the number of a heading, and are no nouns that the number counts. German has
    # none: its nouns have capital letters.
    function_words: frozenset[str] = frozenset()
    # Digits that are other words too (`sei`, `neuf`), and the words before the first number of a range.
    ambiguous: frozenset[str] = frozenset()
    range_from: frozenset[str] = frozenset()
    ordinals: dict[str, int] = field(default_factory=dict)
    # How an ordinal is written; empty: ordinals stay words.
    ordinal: str = ""
    # The first day of a month.
    first_of_month: dict[str, str] = field(default_factory=dict)
    # A number that is written as an ordinal needs a noun after it (German).
    ordinal_needs_noun: bool = False
    # Clock times: words for the hour, words before an hour, words between hour and minutes; the written form.
    # `strict_hours` say that a clock time follows and no duration; they have accents (`à`, `às`).
    hours: frozenset[str] = frozenset()
    strict_hours: frozenset[str] = frozenset()
    clock_before: frozenset[str] = frozenset()
    clock_links: frozenset[str] = frozenset()
    # Verbs before a clock time or a price: `son las tres y veinte`.
    clock_verbs: frozenset[str] = frozenset()
    clock: str = ""
    dayparts: tuple[Phrase, ...] = ()
    # Clock times that stay words: `fünf vor zwölf`, `halb zwölf`.
    spoken_clock: frozenset[str] = frozenset()
    halves: frozenset[str] = frozenset()
    # Numbers after these words are not written with Arabic digits: centuries, kings and popes.
    roman: frozenset[str] = frozenset()
    idioms: tuple[Phrase, ...] = ()

    @cached_property
    def words(self) -> frozenset[str]:
        """All words that may be a part of a number."""
        known = {part for name in (*self.numbers, *self.ordinals) for part in name.split()}
        return frozenset(known | self.thousands)

    @cached_property
    def beside(self) -> frozenset[str]:
        """Words that may belong to a written form beside its number."""
        phrases = {part for phrase in (*self.percents, *self.dayparts, *self.idioms) for part in phrase}
        links = self.thousand_links | self.cent_links | self.clock_links | self.month_links | self.ranges
        # The word before `las` tells a clock time from two numbers.
        links |= self.clock_before
        return frozenset(
            phrases | links | {*self.currencies, *self.points, *self.millions, *self.months} | self.cents | self.hours
        )

    def value(self, text: str) -> int | None:
        """The value of a number below a million that is written as one word, or of one below 1000 in words."""
        if (value := self.numbers.get(text)) is not None or self.joint or len(text) > 60:
            return value
        for thousand in self.thousands:
            before, found, after = text.partition(thousand)
            if not found:
                continue
            many = self.numbers.get(before) if before else 1
            rest = self._rest(after)
            if many and many < 1000 and rest is not None and rest < 1000 and not (thousand == "mille" and before):
                return many * 1000 + rest
        return None

    def _rest(self, text: str) -> int | None:
        if not text:
            return 0
        for link in ("", *self.thousand_links):
            if text.startswith(link) and (value := self.numbers.get(text[len(link) :])):
                return value
        return None


def _table(pairs: Iterable[tuple[int, str]]) -> dict[str, int]:
    return {text: value for value, text in pairs}


def _list(text: str) -> list[str]:
    return fold(text).split()


def _words(text: str) -> frozenset[str]:
    return frozenset(map(fold, text.split()))


def _phrases(*texts: str) -> tuple[Phrase, ...]:
    return tuple(tuple(map(fold, text.split())) for text in texts)


# Numbers that are written as one word


def _german() -> Iterator[tuple[int, str]]:
    units = _list("null ein zwei drei vier fünf sechs sieben acht neun")
    teens = _list("zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn")
    tens = _list("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
    small = [*enumerate(units), (1, "eins"), (2, "zwo"), *enumerate(teens, 10)]
    small += [(10 * ten + one, f"{units[one]}und{name}") for ten, name in enumerate(tens, 2) for one in range(1, 10)]
    small += [(10 * ten, name) for ten, name in enumerate(tens, 2)]
    yield from small
    hundreds = [(1, ""), *enumerate(units[1:], 1), *enumerate(teens[1:], 11)]
    yield from _hundreds(hundreds, "hundert", small, ("", "und"))


def _dutch() -> Iterator[tuple[int, str]]:
    units = _list("nul een twee drie vier vijf zes zeven acht negen")
    teens = _list("tien elf twaalf dertien veertien vijftien zestien zeventien achttien negentien")
    tens = _list("twintig dertig veertig vijftig zestig zeventig tachtig negentig")
    small = [*enumerate(units), *enumerate(teens, 10), *((10 * ten, name) for ten, name in enumerate(tens, 2))]
    small += [(10 * ten + one, f"{units[one]}en{name}") for ten, name in enumerate(tens, 2) for one in range(1, 10)]
    yield from small
    hundreds = [(1, ""), *enumerate(units[1:], 1), *enumerate(teens[1:], 11)]
    yield from _hundreds(hundreds, "honderd", small, ("", "en"))


def _italian() -> Iterator[tuple[int, str]]:
    units = _list("zero uno due tre quattro cinque sei sette otto nove")
    teens = _list("dieci undici dodici tredici quattordici quindici sedici diciassette diciotto diciannove")
    tens = _list("venti trenta quaranta cinquanta sessanta settanta ottanta novanta")
    small = [*enumerate(units), (1, "un"), (1, "una"), *enumerate(teens, 10)]
    for ten, name in enumerate(tens, 2):
        small.append((10 * ten, name))
        small.append((10 * ten + 1, f"{name[:-1]}un"))
        small += [(10 * ten + one, (name[:-1] if one in (1, 8) else name) + units[one]) for one in range(1, 10)]
    yield from small
    hundreds = [(1, ""), *enumerate(units[2:], 2)]
    yield from _hundreds(hundreds, "cento", small, ("",))
    yield from (
        (value, text.replace("cento", "cent", 1))
        for value, text in _hundreds(hundreds, "cento", small, ("",))
        if text.partition("cento")[2][:1] == "o"
    )


def _hundreds(
    hundreds: Iterable[tuple[int, str]], name: str, small: list[tuple[int, str]], links: Phrase
) -> Iterator[tuple[int, str]]:
    for many, prefix in hundreds:
        yield 100 * many, prefix + name
        yield from ((100 * many + rest, prefix + name + link + text) for rest, text in small if rest for link in links)


# Numbers of several words


def _french() -> Iterator[tuple[int, str]]:
    units = _list("zéro un deux trois quatre cinq six sept huit neuf")
    teens = [*_list("dix onze douze treize quatorze quinze seize"), "dix sept", "dix huit", "dix neuf"]
    small = [*enumerate(units), (1, "une"), *enumerate(teens, 10)]
    tens = [(20, "vingt"), (30, "trente"), (40, "quarante"), (50, "cinquante"), (60, "soixante")]
    for value, name in (*tens, (70, "septante"), (80, "huitante"), (80, "octante"), (90, "nonante")):
        small += [(value, name), (value + 1, f"{name} et un"), (value + 1, f"{name} et une")]
        small += [(value + one, f"{name} {units[one]}") for one in range(2, 10)]
    small += [(60 + teen, f"soixante {name}") for teen, name in enumerate(teens, 10)] + [(71, "soixante et onze")]
    small += [(80, "quatre vingts"), (80, "quatre vingt"), (81, "quatre vingt une")]
    small += [(80 + one, f"quatre vingt {name}") for one, name in enumerate((*units[1:], *teens), 1)]
    yield from small
    hundreds = [(1, ""), *((many, f"{name} ") for many, name in enumerate(units[2:], 2))]
    hundreds += [(many, f"{name} ") for many, name in enumerate(teens[1:], 11)]
    yield from ((100 * many, f"{prefix}cents") for many, prefix in hundreds if many > 1)
    yield from _hundreds(hundreds, "cent", small, (" ",))


def _french_ordinals() -> Iterator[tuple[int, str]]:
    yield from ((1, "premiere"), (2, "second"), (2, "seconde"))
    for value, text in _french():
        if 2 <= value < 100 and not text.endswith("une"):
            stem = text.removesuffix("s") if text.endswith("vingts") else text.removesuffix("e")
            stem = f"{stem}u" if stem.endswith("cinq") else f"{stem[:-1]}v" if stem.endswith("neuf") else stem
            yield value, f"{stem}ieme"


def _spanish() -> Iterator[tuple[int, str]]:
    units = _list("cero uno dos tres cuatro cinco seis siete ocho nueve")
    teens = _list("diez once doce trece catorce quince dieciséis diecisiete dieciocho diecinueve")
    tens = _list("treinta cuarenta cincuenta sesenta setenta ochenta noventa")
    ones = [(1, "un"), (1, "una"), *enumerate(units[1:], 1)]
    small = [(0, "cero"), *ones, *enumerate(teens, 10), (20, "veinte")]
    small += [(20 + one, f"veinti{name}") for one, name in ones]
    for ten, name in enumerate(tens, 3):
        small += [(10 * ten, name), *((10 * ten + one, f"{name} y {unit}") for one, unit in ones)]
    yield from small
    names = _list("doscient trescient cuatrocient quinient seiscient setecient ochocient novecient")
    yield 100, "cien"
    hundreds = [(1, "ciento"), *((many, name + end) for many, name in enumerate(names, 2) for end in ("os", "as"))]
    yield from _hundreds(hundreds, "", small, (" ",))


def _portuguese() -> Iterator[tuple[int, str]]:
    units = _list("zero um dois três quatro cinco seis sete oito nove")
    teens = _list("dez onze doze treze catorze quinze dezesseis dezessete dezoito dezenove")
    tens = _list("vinte trinta quarenta cinquenta sessenta setenta oitenta noventa")
    ones = [(1, "uma"), (2, "duas"), *enumerate(units[1:], 1)]
    small = [(0, "zero"), *ones, *enumerate(teens, 10)]
    small += [(14, "quatorze"), (16, "dezasseis"), (17, "dezassete"), (19, "dezanove")]
    for ten, name in enumerate(tens, 2):
        small += [(10 * ten, name), *((10 * ten + one, f"{name} e {unit}") for one, unit in ones)]
    yield from small
    names = _list("duzent trezent quatrocent quinhent seiscent setecent oitocent novecent")
    yield 100, "cem"
    hundreds = [(1, "cento"), *((many, name + end) for many, name in enumerate(names, 2) for end in ("os", "as"))]
    yield from _hundreds(hundreds, "", small, (" e ",))


def _german_ordinals() -> Iterator[tuple[int, str]]:
    odd = {1: "erst", 2: "zweit", 3: "dritt", 7: "siebt", 8: "acht"}
    for value, text in _german():
        if 1 <= value < 100 and text != "ein":
            stem = odd.get(value) or text + ("t" if value < 20 else "st")
            yield from ((value, f"{stem}{end}") for end in ("e", "en", "er", "es", "em"))


def _dutch_ordinals() -> Iterator[tuple[int, str]]:
    odd = {1: "eerste", 3: "derde", 8: "achtste"}
    for value, text in _dutch():
        if 1 <= value < 100:
            yield value, odd.get(value) or text + ("de" if value < 20 else "ste")


_EURO_SIGNS = {"euro": "€", "euros": "€"}

RULES: dict[str, Rules] = {
    "de": Rules(
        numbers=_table(_german()),
        joint="",
        thousands=_words("tausend"),
        thousand_links=_words("und"),
        millions={"million": 10**6, "millionen": 10**6, "milliarde": 10**9, "milliarden": 10**9},
        articles=_words("ein"),
        rounds=_words("hundert tausend"),
        points={"komma": ","},
        group=".",
        percents=_phrases("prozent"),
        percent=f"{SPACE}%",
        currencies={**_EURO_SIGNS, "dollar": "$"},
        cents=_words("cent cents"),
        cent_links=_words("und"),
        sign_first=False,
        months=_words("Januar Jänner Februar März April Mai Juni Juli August September Oktober November Dezember"),
        month_links=frozenset(),
        after_price=_words("pro je das die den der im am für und oder"),
        ranges=_words("bis oder"),
        betweens=_words("zwischen"),
        headings=_words("Kapitel Seite Zimmer Raum Gleis Linie Version Artikel Absatz Frage Nummer Kanal"),
        ordinals=_table(_german_ordinals()),
        ordinal=".",
        ordinal_needs_noun=True,
        hours=_words("uhr"),
        clock="{hour}:{minute:02}" + SPACE + "Uhr",
        spoken_clock=_words("vor nach"),
        halves=_words("halb viertel dreiviertel"),
        idioms=_phrases("null acht fünfzehn", "null acht fuffzehn"),
    ),
    "nl": Rules(
        numbers=_table(_dutch()),
        joint="",
        thousands=_words("duizend"),
        thousand_links=_words("en"),
        millions={"miljoen": 10**6, "miljard": 10**9},
        articles=_words("een"),
        rounds=_words("honderd duizend"),
        points={"komma": ","},
        group=".",
        percents=_phrases("procent"),
        percent="%",
        currencies={**_EURO_SIGNS, "dollar": "$"},
        cents=_words("cent"),
        cent_links=_words("en"),
        sign_first=True,
        months=_words("januari februari maart april mei juni juli augustus september oktober november december"),
        month_links=frozenset(),
        after_price=_words("per het de voor en of"),
        ranges=_words("tot of"),
        betweens=_words("tussen"),
        function_words=_words(
            "de het en of maar op in aan bij voor van met naar uit tot ga gaat is was zijn waren heb hebben had moet "
            "moeten kan ben wordt begint vertrekt komt ik je jij u hij zij ze we wij dan precies morgen niet ook"
        ),
        headings=_words("hoofdstuk pagina bladzijde kamer spoor lijn versie artikel aflevering deel vraag nummer"),
        ordinals=_table(_dutch_ordinals()),
        ordinal="e",
        first_of_month={"eerste": "1"},
        strict_hours=frozenset("om".split()),
        hours=_words("uur"),
        clock="{hour}:{minute:02}" + SPACE + "uur",
        spoken_clock=_words("voor over"),
        halves=_words("half kwart"),
        idioms=_phrases("zeven sloten"),
    ),
    "fr": Rules(
        numbers=_table(_french()),
        joint=" ",
        thousands=_words("mille mil"),
        thousand_links=frozenset(),
        millions={"million": 10**6, "millions": 10**6, "milliard": 10**9, "milliards": 10**9},
        articles=_words("un une"),
        rounds=_words("cent mille mil"),
        points={"virgule": ","},
        group=THIN_SPACE,
        percents=_phrases("pour cent"),
        percent=f"{SPACE}%",
        currencies={**_EURO_SIGNS, "dollar": "$", "dollars": "$"},
        cents=_words("centime centimes"),
        cent_links=_words("et"),
        sign_first=False,
        months=_words("janvier février mars avril mai juin juillet août septembre octobre novembre décembre"),
        month_links=frozenset(),
        after_price=_words("le la les l par pour et ou au chacun"),
        ranges=_words("à ou"),
        betweens=_words("entre"),
        function_words=_words(
            "le la les de du des à au aux et ou mais pour par sur dans en avec chez devant je tu il elle on nous vous "
            "ils elles ce est sont était pile précises environ demain ne que qui car donc plus"
        ),
        headings=_words("chapitre page chambre salle quai ligne version article épisode tome question numéro"),
        ambiguous=_words("neuf"),
        range_from=_words("de entre"),
        ordinals=_table(_french_ordinals()),
        ordinal="e",
        first_of_month={"premier": "1er"},
        strict_hours=frozenset("à dès vers".split()),
        hours=_words("heure heures"),
        clock="{hour}" + SPACE + "h" + SPACE + "{minute:02}",
        spoken_clock=_words("moins"),
        roman=_words("louis charles henri françois philippe napoléon benoît pie"),
        idioms=_phrases(
            "son trente et un", "trente six chandelles", "quatre cents coups", "trente six du mois", "vingt dieux"
        ),
    ),
    "es": Rules(
        numbers=_table(_spanish()),
        joint=" ",
        thousands=_words("mil"),
        thousand_links=frozenset(),
        millions={"millón": 10**6, "millon": 10**6, "millones": 10**6, "billón": 10**12, "billones": 10**12},
        articles=_words("un una uno"),
        rounds=_words("cien ciento mil"),
        points={"coma": ",", "punto": "."},
        group=".",
        percents=_phrases("por ciento"),
        percent=f"{SPACE}%",
        currencies={**_EURO_SIGNS, "dólar": "$", "dolar": "$", "dólares": "$", "dolares": "$"},
        cents=_words("céntimo céntimos centavo centavos"),
        cent_links=_words("con y"),
        sign_first=False,
        months=_words(
            "enero febrero marzo abril mayo junio julio agosto septiembre setiembre octubre noviembre diciembre"
        ),
        month_links=_words("de"),
        after_price=_words("el la los las por y o cada"),
        ranges=_words("a o"),
        betweens=_words("entre"),
        function_words=_words(
            "el la los las de del a al y o pero para por en con sobre yo tú él ella nos me te se no que es son está "
            "están era hay mañana hoy"
        ),
        headings=_words("capítulo página habitación sala andén línea versión artículo episodio tomo número canal"),
        clock_before=_words("las la"),
        strict_hours=frozenset("a desde hasta sobre".split()),
        clock_links=_words("y"),
        clock_verbs=_words("son es eran era cuesta cuestan vale valen"),
        clock="{hour}:{minute:02}",
        dayparts=_phrases("de la mañana", "de la tarde", "de la noche", "de la madrugada"),
        spoken_clock=_words("menos"),
        roman=_words("siglo luis juan alfonso benedicto pío fernando león"),
        idioms=_phrases("sus trece", "las mil y una"),
    ),
    "pt": Rules(
        numbers=_table(_portuguese()),
        joint=" ",
        thousands=_words("mil"),
        thousand_links=_words("e"),
        millions={
            **dict.fromkeys(("milhão", "milhao", "milhões", "milhoes"), 10**6),
            **dict.fromkeys(("bilhão", "bilhao", "bilhões", "bilhoes"), 10**9),
        },
        articles=_words("um uma"),
        rounds=_words("cem cento mil"),
        points={"vírgula": ",", "virgula": ",", "ponto": "."},
        group=".",
        percents=_phrases("por cento"),
        percent="%",
        currencies={**_EURO_SIGNS, "real": "R$", "reais": "R$"},
        cents=_words("cêntimo cêntimos centavo centavos"),
        cent_links=_words("e"),
        sign_first=False,
        months=_words("janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro"),
        month_links=_words("de"),
        after_price=_words("o os as por e ou cada"),
        ranges=_words("a ou"),
        betweens=_words("entre"),
        function_words=_words(
            "o a os as de do da dos das ao à em no na nos nas e ou mas para por com eu ele ela nós eles elas me se não "
            "que é são está estão era há amanhã hoje"
        ),
        headings=_words("capítulo página quarto sala linha versão artigo episódio volume questão número canal"),
        first_of_month={"primeiro": "1º"},
        clock_before=_words("às as das"),
        strict_hours=frozenset("às".split()),
        clock_links=_words("e"),
        clock_verbs=_words("são é eram era custa custam custou vale"),
        clock="{hour}h{minute:02}",
        dayparts=_phrases("da manhã", "da tarde", "da noite", "da madrugada"),
        spoken_clock=_words("para"),
        roman=_words("século luís joão pio bento leão"),
        idioms=_phrases("trinta por uma linha", "mil e uma"),
    ),
    "it": Rules(
        numbers=_table(_italian()),
        joint="",
        thousands=_words("mille mila"),
        thousand_links=frozenset(),
        millions={"milione": 10**6, "milioni": 10**6, "miliardo": 10**9, "miliardi": 10**9},
        articles=_words("un uno una"),
        rounds=_words("cento mille"),
        points={"virgola": ","},
        group=".",
        percents=_phrases("per cento", "percento"),
        percent="%",
        currencies={"euro": "€", "dollaro": "$", "dollari": "$"},
        cents=_words("centesimo centesimi"),
        cent_links=_words("e"),
        sign_first=False,
        months=_words("gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre"),
        month_links=frozenset(),
        after_price=_words("il la per e o l'uno ciascuno"),
        ranges=_words("a o"),
        betweens=_words("tra fra"),
        function_words=_words(
            "il lo la i gli le di del della da dal a al alla in nel nella e o ma per con su io lui lei noi ci mi ti si "
            "non che è sono era c'è domani oggi"
        ),
        headings=_words("capitolo pagina camera stanza sala binario linea versione articolo episodio numero canale"),
        clock_before=_words("alle le dalle delle ore"),
        strict_hours=frozenset("alle dalle".split()),
        clock_links=_words("e"),
        clock_verbs=_words("sono erano costa costano"),
        ambiguous=_words("sei"),
        range_from=_words("da dal dalle tra fra"),
        clock="{hour}:{minute:02}",
        dayparts=_phrases("di mattina", "del mattino", "di sera", "del pomeriggio", "di notte"),
        spoken_clock=_words("meno"),
        roman=_words("secolo luigi pio leone giovanni benedetto carlo"),
        idioms=_phrases("un quarantotto", "mille e una"),
    ),
}
