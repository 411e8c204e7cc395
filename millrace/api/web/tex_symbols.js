// What TeX's names stand for.

const pairs = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split(":")));

export const SYMBOLS = {
  ...pairs(`
  alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ lambda:λ
  mu:μ nu:ν xi:ξ pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω
  Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω
  times:× cdot:⋅ div:÷ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ ominus:⊖ otimes:⊗ odot:⊙ wedge:∧ vee:∨
  land:∧ lor:∨ lnot:¬ neg:¬ cap:∩ cup:∪ setminus:∖ sqcup:⊔ uplus:⊎ dagger:† amalg:⨿
  leq:≤ le:≤ geq:≥ ge:≥ neq:≠ ne:≠ ll:≪ gg:≫ approx:≈ sim:∼ simeq:≃ cong:≅ equiv:≡ propto:∝ asymp:≍ doteq:≐
  leqslant:⩽ geqslant:⩾ lesssim:≲ gtrsim:≳ prec:≺ succ:≻ preceq:⪯ succeq:⪰ coloneqq:≔ triangleq:≜
  in:∈ notin:∉ ni:∋ subset:⊂ supset:⊃ subseteq:⊆ supseteq:⊇ subsetneq:⊊ sqsubseteq:⊑ emptyset:∅ varnothing:∅
  forall:∀ exists:∃ nexists:∄ therefore:∴ because:∵ vdash:⊢ models:⊨ top:⊤ bot:⊥ perp:⊥ parallel:∥ mid:∣ nmid:∤
  to:→ rightarrow:→ leftarrow:← gets:← leftrightarrow:↔ Rightarrow:⇒ Leftarrow:⇐ Leftrightarrow:⇔ implies:⟹ iff:⟺
  impliedby:⟸ longrightarrow:⟶ longleftarrow:⟵ Longrightarrow:⟹ Longleftrightarrow:⟺ mapsto:↦ longmapsto:⟼
  uparrow:↑ downarrow:↓ updownarrow:↕ Uparrow:⇑ Downarrow:⇓ nearrow:↗ searrow:↘ hookrightarrow:↪ rightharpoonup:⇀
  rightleftharpoons:⇌ rightsquigarrow:⇝ xrightarrow:→
  infty:∞ partial:∂ nabla:∇ hbar:ℏ ell:ℓ Re:ℜ Im:ℑ aleph:ℵ wp:℘ angle:∠ triangle:△ square:□ Box:□ blacksquare:■
  diamond:⋄ prime:′ degree:° imath:ı jmath:ȷ surd:√ checkmark:✓ complement:∁ clubsuit:♣ heartsuit:♥ spadesuit:♠
  ldots:… dots:… cdots:⋯ vdots:⋮ ddots:⋱ dotsc:… dotsb:⋯ colon:: langle:⟨ rangle:⟩ lceil:⌈ rceil:⌉ lfloor:⌊ rfloor:⌋
  lVert:‖ rVert:‖ Vert:‖ lvert:| rvert:| vert:| backslash:\\ lbrace:{ rbrace:} lbrack:[ rbrack:]
  `),
  colon: ":", "{": "{", "}": "}", "%": "%", "&": "&", "#": "#", $: "$", _: "_", "|": "‖", backslash: "\\",
};

export const OPERATORS = pairs(`
  sum:∑ prod:∏ coprod:∐ int:∫ iint:∬ iiint:∭ oint:∮ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀
  bigsqcup:⨆ biguplus:⨄
`);

export const FUNCTIONS = new Set(`
  sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp lim max min sup inf limsup liminf
  det dim ker deg gcd hom arg Pr argmax argmin
`.trim().split(/\s+/));

export const SPACES = {
  ",": "0.17em", ":": "0.22em", ">": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.3em", "\n": "0.3em",
  quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.17em", "\\": "1em",
};

export const ACCENTS = {
  hat: { mark: "^" }, widehat: { mark: "^", wide: true }, tilde: { mark: "~" }, widetilde: { mark: "~", wide: true },
  bar: { mark: "¯" }, overline: { mark: "‾", wide: true }, vec: { mark: "→" }, dot: { mark: "˙" }, ddot: { mark: "¨" },
  check: { mark: "ˇ" }, breve: { mark: "˘" }, acute: { mark: "´" }, grave: { mark: "`" }, mathring: { mark: "˚" },
  overrightarrow: { mark: "→", wide: true }, overleftarrow: { mark: "←", wide: true }, overbrace: { mark: "⏞", wide: true },
  underline: { mark: "_", under: true, wide: true }, underbrace: { mark: "⏟", under: true, wide: true },
};

export const BIG = new Map(["big", "Big", "bigg", "Bigg"].flatMap((name, i) =>
  ["", "l", "r", "m"].map((side) => [name + side, [1.2, 1.6, 2.1, 2.6][i]])));

const aligned = { align: "right left right left right left", display: true, class: "aligned" };
export const ENVIRONMENTS = {
  matrix: {}, pmatrix: { fences: "()" }, bmatrix: { fences: "[]" }, Bmatrix: { fences: "{}" }, vmatrix: { fences: "||" },
  Vmatrix: { fences: "‖‖" }, smallmatrix: {}, cases: { fences: ["{", ""], align: "left" }, array: { columns: true },
  aligned, align: aligned, "align*": aligned, split: aligned, eqnarray: aligned, "eqnarray*": aligned,
  gathered: { display: true }, gather: { display: true }, "gather*": { display: true },
  equation: { display: true }, "equation*": { display: true },
};

const BASES = { // of A, a and 0 in Unicode's mathematical alphabets
  bf: [0x1d400, 0x1d41a, 0x1d7ce], it: [0x1d434, 0x1d44e, 0], cal: [0x1d49c, 0x1d4b6, 0], frak: [0x1d504, 0x1d51e, 0],
  bb: [0x1d538, 0x1d552, 0x1d7d8], sf: [0x1d5a0, 0x1d5ba, 0x1d7e2], tt: [0x1d670, 0x1d68a, 0x1d7f6],
};
const ELSEWHERE = { // letters that were there before those alphabets
  bb: { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" },
  cal: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" },
  frak: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" },
  it: { h: "ℎ" },
};

export function styled(text, variant) {
  const bases = BASES[variant];
  if (!bases) return text;
  return [...text].map((c) => {
    const other = ELSEWHERE[variant]?.[c];
    if (other) return other;
    const [from, base] = /[A-Z]/.test(c) ? ["A", bases[0]] : /[a-z]/.test(c) ? ["a", bases[1]] : /[0-9]/.test(c) ? ["0", bases[2]] : [];
    return base ? String.fromCodePoint(base + c.charCodeAt(0) - from.charCodeAt(0)) : c;
  }).join("");
}
