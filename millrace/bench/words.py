"""The words that generated prompts are made of: common, short, and mostly one token each."""

from __future__ import annotations

_TEXT = """
water river bridge stone miller wheel grain flour market road winter summer morning evening
light shadow window door garden orchard apple bread table lamp paper letter story song voice
child mother father brother sister friend neighbour stranger teacher farmer sailor captain
doctor painter singer baker horse bird fish dog sheep forest mountain valley field meadow hill
island harbour ship boat sail rope anchor wind rain snow storm cloud sky star moon sun fire
smoke ash iron copper silver gold glass wood leaf branch root seed flower grass dust sand clay
village town city street square tower wall gate roof floor room kitchen cellar barn mill shop
school church library theatre station train track engine machine clock bell mirror picture
book page word name number answer question reason secret promise dream memory plan idea game
journey step path corner edge centre north south east west left right far near old young new
small large long short deep wide narrow heavy quiet loud warm cold dark bright clean dry soft
hard slow quick early late first last next other same every many few some more most little
walked ran stood sat waited watched listened spoke asked told heard saw found lost kept gave
took brought carried opened closed turned moved stopped started finished built broke fixed
washed cooked ate drank slept woke wrote read sang played worked rested climbed fell crossed
followed led met left came went became seemed remained grew changed learned knew thought
believed remembered forgot hoped feared wanted needed liked loved helped saved paid sold
and but while because before after until when where under over through across between behind
beside above below along around toward against without within upon from into with for about
the a this that these those his her their our its one two three four five six seven eight
slowly quickly quietly gently carefully suddenly finally again often never always soon already
still together alone almost perhaps indeed however instead therefore meanwhile
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
