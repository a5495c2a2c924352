"""Recurrences of papers in NumPy, one head at a time, each in the symbols and the orientation of its paper.

Arrays are `[T, …]`, outputs are `[T, V]`. The caller applies feature maps, norms and projections.
"""

import numpy as np


def linear_attention(q, k, v, normalized):
    """Katharopoulos et al. 2020, equations 16 to 20: s is `[K, V]`, z is `[K]`."""
    s, z, y = np.zeros((k.shape[1], v.shape[1])), np.zeros(k.shape[1]), []
    for q_i, k_i, v_i in zip(q, k, v):
        s, z = s + np.outer(k_i, v_i), z + k_i
        y.append(q_i @ s / (q_i @ z) if normalized else q_i @ s)
    return np.stack(y)


def retention(q, k, v, gamma):
    """Sun et al. 2023, equation 6: S_n = γ S_{n−1} + K_nᵀ V_n, o_n = Q_n S_n."""
    s, o = np.zeros((k.shape[1], v.shape[1])), []
    for q_n, k_n, v_n in zip(q, k, v):
        s = gamma * s + k_n[:, None] @ v_n[None]
        o.append(q_n @ s)
    return np.stack(o)


def mamba2(x, dt, a, b, c):
    """Dao and Gu 2024, the SSM with one decay per head, discretized: h `[N, P]`, A a scalar, Δ one number per token."""
    h, y = np.zeros((b.shape[1], x.shape[1])), []
    for x_t, dt_t, b_t, c_t in zip(x, dt, b, c):
        h = np.exp(dt_t * a) * h + dt_t * np.outer(b_t, x_t)
        y.append(c_t @ h)
    return np.stack(y)


def gla(q, k, v, alpha):
    """Yang et al. 2023, section 4: S_t = Diag(α_t) S_{t−1} + k_tᵀ v_t; o_t = q_t S_t."""
    s, o = np.zeros((k.shape[1], v.shape[1])), []
    for q_t, k_t, v_t, alpha_t in zip(q, k, v, alpha):
        s = np.diag(alpha_t) @ s + np.outer(k_t, v_t)
        o.append(q_t @ s)
    return np.stack(o)


def hgrn2(i, forget, o):
    """Qin et al. 2024, section 3: h_t = h_{t−1} Diag(f_t) + i_t ⊗ (1 − f_t), y_t = h_t o_t, with h `[V, K]`."""
    h, y = np.zeros((i.shape[1], forget.shape[1])), []
    for i_t, f_t, o_t in zip(i, forget, o):
        h = h @ np.diag(f_t) + np.outer(i_t, 1 - f_t)
        y.append(h @ o_t)
    return np.stack(y)


def delta_net(q, k, v, beta):
    """Yang et al. 2024, section 2.2: S_t = S_{t−1} − β_t (S_{t−1} k_t − v_t) k_tᵀ, o_t = S_t q_t, with S `[V, K]`."""
    s, o = np.zeros((v.shape[1], k.shape[1])), []
    for q_t, k_t, v_t, beta_t in zip(q, k, v, beta):
        s = s - beta_t * np.outer(s @ k_t - v_t, k_t)
        o.append(s @ q_t)
    return np.stack(o)


def gated_delta_net(q, k, v, alpha, beta):
    """Yang et al. 2025: S_t = S_{t−1} (α_t (I − β_t k_t k_tᵀ)) + β_t v_t k_tᵀ, with S `[V, K]`."""
    s, o = np.zeros((v.shape[1], k.shape[1])), []
    for q_t, k_t, v_t, alpha_t, beta_t in zip(q, k, v, alpha, beta):
        s = s @ (alpha_t * (np.eye(len(k_t)) - beta_t * np.outer(k_t, k_t))) + beta_t * np.outer(v_t, k_t)
        o.append(s @ q_t)
    return np.stack(o)


def kda(q, k, v, alpha, beta):
    """Kimi Team 2025, equation 1: S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ; o_t = S_tᵀ q_t."""
    s, o = np.zeros((k.shape[1], v.shape[1])), []
    for q_t, k_t, v_t, alpha_t, beta_t in zip(q, k, v, alpha, beta):
        s = (np.eye(len(k_t)) - beta_t * np.outer(k_t, k_t)) @ np.diag(alpha_t) @ s + beta_t * np.outer(k_t, v_t)
        o.append(s.T @ q_t)
    return np.stack(o)


def gdn2(q, k, v, alpha, b, w):
    """Gated DeltaNet 2: S_t = (I − k_t (b_t ⊙ k_t)ᵀ) Diag(α_t) S_{t−1} + k_t (w_t ⊙ v_t)ᵀ; o_t = S_tᵀ q_t."""
    s, o = np.zeros((k.shape[1], v.shape[1])), []
    for q_t, k_t, v_t, alpha_t, b_t, w_t in zip(q, k, v, alpha, b, w):
        s = (np.eye(len(k_t)) - np.outer(k_t, b_t * k_t)) @ np.diag(alpha_t) @ s + np.outer(k_t, w_t * v_t)
        o.append(s.T @ q_t)
    return np.stack(o)


def rwkv7(r, k, v, w, kappa, a):
    """Peng et al. 2025, section 4: S_t = S_{t−1} (diag(w_t) − κ_tᵀ (a_t ⊙ κ_t)) + v_tᵀ k_t, with S `[V, K]`."""
    s, y = np.zeros((v.shape[1], k.shape[1])), []
    for r_t, k_t, v_t, w_t, kappa_t, a_t in zip(r, k, v, w, kappa, a):
        s = s @ (np.diag(w_t) - np.outer(kappa_t, a_t * kappa_t)) + np.outer(v_t, k_t)
        y.append(s @ r_t)
    return np.stack(y)


def gated_delta_product(q, k, v, g, beta):
    """Siems et al. 2025, section 3: H_i = A_i H_{i−1} + B_i by n_h steps, k and v `[T, n_h, …]`, β `[T, n_h]`.

    A_i = g_i Π_j (I − β_ij k_ij k_ijᵀ), with the last step on the left; B_i sums the writes, each times later steps.
    """
    h, y = np.zeros((k.shape[2], v.shape[2])), []
    for q_i, k_i, v_i, g_i, beta_i in zip(q, k, v, g, beta):
        a, b = g_i * np.eye(k.shape[2]), np.zeros_like(h)
        for k_ij, v_ij, beta_ij in zip(k_i, v_i, beta_i):
            step = np.eye(len(k_ij)) - beta_ij * np.outer(k_ij, k_ij)
            a, b = step @ a, step @ b + beta_ij * np.outer(k_ij, v_ij)
        h = a @ h + b
        y.append(q_i @ h)
    return np.stack(y)
